"""How much of the 70B claim hangs on what is assumed, and how long a search for a shape takes.

    .venv/bin/python benchmarks/claim.py

Each share of a peak that is assumed is moved to a low and to a high value, one at a time, and the plans of
`trimtab simulate --preset 70b --gpus 8` are worked out again; likewise sequence length and global batch. Then the
search alone is timed. Prints; asserts nothing.
"""

import time
from dataclasses import replace

from trimtab.balance.deciding.search import Appraiser, Training, search
from trimtab.balance.model.accelerators import ACCELERATORS, Accelerator
from trimtab.balance.model.placement import Cluster
from trimtab.balance.model.transformer import OptimizerState, Sizes
from trimtab.simulation.compare import Question, compare
from trimtab.simulation.presets import PRESETS, SEQUENCES_PER_GPU

SHARES = {
    "matmul_ratio": (0.5, 0.8),
    "attention_ratio": (0.3, 0.7),
    "memory_ratio": (0.6, 0.95),
    "link_ratio": (0.5, 0.95),
}
SEARCHES = (("7b", 8, "device"), ("70b", 8, "host"), ("70b", 64, "device"), ("405b", 256, "device"))
H100 = ACCELERATORS["h100"]
LLAMA_70B = Sizes(**PRESETS["70b"])


def main() -> None:
    """Print both tables."""
    print(f"{'':26}{'static':>8}{'chosen':>8}{'bubble':>8}{'step s':>8}{'faster':>8}{'MFU':>7}  chosen plan")
    show("as assumed", H100)
    for name, values in SHARES.items():
        for value in values:
            show(f"{name} {value:g}", replace(H100, achievable=replace(H100.achievable, **{name: value})))
    for length in (2048, 8192):
        show(f"sequences of {length:,}", H100, replace(LLAMA_70B, sequence_length=length))
    for batch in (16, 64, 128):
        show(f"{batch} sequences", H100, batch=batch)
    print(f"\n{'search':26}{'seconds':>8}{'CPU':>8}{'tried':>8}{'simulated':>11}")
    for preset, gpus, optimizer in SEARCHES:
        time_search(preset, gpus, OptimizerState(optimizer))


def show(name: str, accelerator: Accelerator, sizes: Sizes = LLAMA_70B, batch: int = 32) -> None:
    """One row: stage efficiency of both plans, and the chosen one's other figures."""
    found = compare(Question(sizes, Cluster(accelerator, 8), batch))
    static, chosen = found.static.estimate, found.chosen.estimate
    print(
        f"{name:26}{static.stage_efficiency_ratio:8.1%}{chosen.stage_efficiency_ratio:8.1%}{chosen.bubble_ratio:8.1%}"
        f"{chosen.step_seconds:8.2f}{static.step_seconds / chosen.step_seconds:8.2f}"
        f"{found.utilization_ratio(found.chosen):7.1%}  {found.chosen.configuration}"
    )


def time_search(preset: str, gpus: int, optimizer: OptimizerState) -> None:
    """One row."""
    training = Training(Sizes(**PRESETS[preset]), SEQUENCES_PER_GPU * gpus, optimizer=optimizer)
    begin, cpu = time.monotonic(), time.process_time()
    considered = search(Appraiser(training, Cluster(H100, gpus))).considered
    simulated = sum(one.step_seconds is not None for one in considered)
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    print(f"{f'{preset} on {gpus} GPUs':26}{seconds:8.2f}{cpu:8.2f}{len(considered):8}{simulated:11}")


if __name__ == "__main__":
    main()
