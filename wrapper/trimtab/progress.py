"""The line that a user reads while the job trains."""

from collections import deque
from collections.abc import Mapping

from trimtab.balance.detect import imbalance
from trimtab.balance.steps import Step, assemble
from trimtab.protocol import Balance, Hello, StepReport


class Progress:
    """Puts the ranks' reports of a step together, and words each complete step."""

    def __init__(self, world_size: int, steps: int, balance: Balance) -> None:
        self._world_size = world_size
        self._steps = steps
        self._balance = balance
        self._pending: dict[int, list[StepReport]] = {}
        self._window: deque[Step] = deque(maxlen=balance.window_steps)

    def add(self, report: StepReport, ranks: Mapping[int, Hello]) -> str | None:
        """The line of a step when `report` was the last that it lacked."""
        reports = self._pending.setdefault(report.step, [])
        reports.append(report)
        if len(reports) < self._world_size:
            return None
        step = assemble(self._pending.pop(report.step), ranks)
        self._window.append(step)
        return self._line(step)

    def _line(self, step: Step) -> str:
        loss = "   -  " if step.loss is None else f"{step.loss:6.3f}"
        width = len(str(self._steps))
        line = (
            f"step {step.step:{width}}/{self._steps}  loss {loss}  {step.tokens / step.duration_seconds:8,.0f} tokens/s"
        )
        apart = imbalance(stage for past in self._window for stage in past.stages)
        if apart is None:
            return line
        line += f"  imbalance {apart.ratio:5.1%}"
        if apart.ratio < self._balance.trigger_ratio:
            return line
        replica = f" of replica {apart.replica}" if any(stage.replica for stage in step.stages) else ""
        return f"{line}  stage {apart.stage}{replica} is the slowest"
