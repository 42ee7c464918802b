"""Under which settings an attempt's steps ran: what a reshape has changed, steps before it say nothing about. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.protocol import Layout, Setting
from trimtab_slurm.contents import TrainingProfile


@dataclass(frozen=True)
class Settings:
    """The settings of an attempt in the order in which they were in force; none where the file has no such table."""

    settings: tuple[Setting, ...]
    first_steps: npt.NDArray[np.int64]
    """[N] the first step under each, ascending."""

    @property
    def last(self) -> Setting | None:
        """The one in force at the end; None: that of the job."""
        return self.settings[-1] if self.settings else None

    @property
    def changed(self) -> bool:
        """Whether any was reshaped into another."""
        return len(self.settings) > 1

    def numbers(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Which one each step ran under, from 1; 0: that of the job, before any was recorded."""
        return np.searchsorted(self.first_steps, steps, side="right")

    def counts(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each step ran under the last one."""
        return np.asarray(self.numbers(steps) == len(self.settings))


def settings_of(training: TrainingProfile) -> Settings:
    """From a profile's table. Raises ValueError where it does not fit the ranks."""
    table = training.settings
    if not table:
        return Settings((), np.array([], dtype=np.int64))
    first_steps = np.asarray(table["step"], dtype=np.int64)
    columns = (table[name].tolist() for name in ("layout", "microbatches", "recomputed_layers"))
    found = []
    for step, layout, microbatches, recomputed_layers in zip(first_steps.tolist(), *columns, strict=True):
        try:
            setting = Setting(
                Layout.parse(layout, int(training.attributes["pipeline"])),
                _counts(microbatches),
                _counts(recomputed_layers),
            )
        except ValueError as error:
            raise ValueError(f"the setting of step {step} cannot be read: {error}") from error
        if len(setting.microbatches) != training.attributes["data"] or min(setting.microbatches) < 1:
            raise ValueError(f"the setting of step {step} is not one of {training.attributes['data']} replicas")
        if len(setting.recomputed_layers) != setting.layout.stages or min(setting.recomputed_layers) < 0:
            raise ValueError(f"the setting of step {step} is not one of {setting.layout.stages} stages")
        found.append(setting)
    if (np.diff(first_steps) <= 0).any():
        raise ValueError("the settings are not in the order of their steps: the file is damaged")
    return Settings(tuple(found), first_steps)


def _counts(text: str) -> tuple[int, ...]:
    """ "8|6" -> (8, 6)."""
    return tuple(map(int, text.split("|")))
