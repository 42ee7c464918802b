"""What the wrapper makes of the ranks' reports while they train: whole steps, and a watch for imbalance over them."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.account import MOST_BEHIND_STEPS
from trimtab.balance.detect import Detection, Finding, Imbalance, Watch, observe
from trimtab.balance.measuring.steps import Step, assemble
from trimtab.protocol import Balance, Hello, Setting, StepReport


class Assembly:
    """Puts the reports of a step together as they come."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pending: dict[int, list[StepReport]] = {}

    def add(self, report: StepReport, ranks: Mapping[int, Hello]) -> Step | None:
        """The whole step, when `report` was the last that it lacked."""
        reports = self._pending.setdefault(report.step, [])
        reports.append(report)
        if len(reports) < self._world_size:
            if len(self._pending) > MOST_BEHIND_STEPS:
                del self._pending[min(self._pending)]
            return None
        # Each rank reports its steps in order: what an earlier one still lacks has been lost.
        self._pending = {step: later for step, later in self._pending.items() if step > report.step}
        return assemble(reports, ranks)


@dataclass(frozen=True)
class Sight:
    """What a step has shown."""

    event: str | None = None
    """That the stages are lastingly apart, or level again: a sentence."""
    probe: str | None = None
    """Why the ranks shall be probed now; None: they need not be."""
    window: Imbalance | None = None
    """The one that it has completed."""


class Lookout:
    """Watches the steps of a run for imbalance.

    With one replica, a slow device cannot be told from a stage that has more to do: then it asks for a probe each time
    that the stages have come apart. And for one once the ranks are warm: a device that has become slow is told from one
    that always was by it, and it costs a few milliseconds, once.
    """

    def __init__(self, policy: Balance) -> None:
        self._policy = policy
        self._watch: Watch | None = None
        self._window: Imbalance | None = None
        self._found: Finding | None = None
        self._probed = False

    @property
    def detection(self) -> Detection:
        """What the steps under the setting in force have shown: of the windows the last one alone."""
        return Detection((self._window,) if self._window else (), (self._found,) if self._found else ())

    def see(self, step: Step, setting: Setting) -> Sight:
        """What the next whole step has shown, and under which setting it was taken."""
        before = self._watch or Watch(step.places, self._policy, setting)
        self._watch, window = observe(before, step.step, step.relative_seconds(setting.loads), setting)
        if setting != before.setting:
            self._window = self._found = None
        if window is None:
            return Sight(None, self._reason_to_probe(step, self._watch, before))
        self._window = window
        if self._watch.triggered == before.triggered:
            return Sight(window=window)
        since = self._watch.since_step
        self._found = None if since is None else Finding(since, step.step, None, window)
        event = _sentence(window, since, step.replicas)
        return Sight(event, self._reason_to_probe(step, self._watch, before), window)

    def _reason_to_probe(self, step: Step, after: Watch, before: Watch) -> str | None:
        if step.replicas > 1 or len(step.places) < 2:
            return None
        if after.triggered and not before.triggered:
            return "the stages have come apart"
        if not self._probed and not after.skip:
            self._probed = True
            return "the ranks are warm"
        return None


def _sentence(window: Imbalance, since_step: int | None, replicas: int) -> str:
    """What has changed, once the window has shown it; `since_step`: since when the stages are apart."""
    replica, stage = window.place
    slowest = f"stage {stage} of replica {replica}" if replicas > 1 else f"stage {stage}"
    takes = f"takes {window.ratio:.1%} longer than the median stage"
    if since_step is not None:
        return f"since step {since_step} {slowest} {takes}, at least {window.lower_ratio:.1%}"
    since = f"the stages are level again since step {window.first_step}"
    return f"{since}: {slowest} {takes}, at most {window.upper_ratio:.1%}"
