"""A short matrix product that is the same on all ranks: how fast this rank's device is, whatever its stage has to do.

It draws no random number and keeps nothing: training goes on as if it had not been.
"""

from collections.abc import Callable
from statistics import median

import torch

from trimtab_megatron.stage_clock import Timer, make_timer

CPU_SIZE = 384
"""About 1 ms on one core."""
GPU_SIZES = {torch.float32: 2048, torch.bfloat16: 4096}
"""Between 0.1 and 1 ms on a device of the last years: long beside what it takes to launch it. 100 MB at most."""
WARM_UPS, REPETITIONS = 3, 9


def product_seconds(
    device: torch.device, dtype: torch.dtype, slow: Callable[[Timer, bool], Timer] | None = None
) -> float:
    """Time of one product on this device, in the precision that the model trains in: the median of its repetitions.

    Counted as the stage clock does: by events on a GPU, as CPU time of the process on a CPU. `slow` is that of a
    StageClock.
    """
    cuda = device.type == "cuda"
    size = GPU_SIZES[dtype] if cuda else CPU_SIZE
    # A device can draw less power, and so run faster, on zeros or ones than on figures like those of a model.
    values = torch.arange(size * size, dtype=torch.float32, device=device).sin_().view(size, size).to(dtype)
    product = torch.empty_like(values)
    timers = [make_timer(cuda) for _ in range(WARM_UPS + REPETITIONS)]
    if slow is not None:
        timers = [slow(timer, cuda) for timer in timers]
    for timer in timers:  # all are launched before the first is read: none waits for the host
        timer.start()
        torch.mm(values, values, out=product)
        timer.stop()
    return median(timer.read_seconds() for timer in timers[WARM_UPS:])
