"""The line that a user reads while the job trains."""

from collections import deque

import numpy as np

from trimtab.balance.detect import imbalance
from trimtab.balance.measuring.steps import Step
from trimtab.protocol import Balance, Setting


class Progress:
    """Words each step, with the imbalance over the latest ones under its setting."""

    def __init__(self, steps: int, policy: Balance) -> None:
        self._steps = steps
        self._policy = policy
        self._window: deque[Step] = deque(maxlen=policy.window_steps)
        self._setting: Setting | None = None

    def line(self, step: Step, setting: Setting) -> str:
        """The line of the next step."""
        if setting != self._setting:
            self._window.clear()
            self._setting = setting
        self._window.append(step)
        loss = "   -  " if step.loss is None else f"{step.loss:6.3f}"
        width = len(str(self._steps))
        line = (
            f"step {step.step:{width}}/{self._steps}  loss {loss}  {step.tokens / step.duration_seconds:8,.0f} tokens/s"
        )
        loads = setting.loads
        seconds = np.array([past.relative_seconds(loads) for past in self._window])
        apart = imbalance(seconds, [past.step for past in self._window], step.places)
        if apart is None:
            return line
        line += f"  imbalance {apart.ratio:5.1%}"
        if apart.ratio < self._policy.trigger_ratio:
            return line
        replica, stage = apart.place
        of_replica = f" of replica {replica}" if step.replicas > 1 else ""
        return f"{line}  stage {stage}{of_replica} is the slowest"
