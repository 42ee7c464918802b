"""One rank that runs several cases of training with reshapes, and writes down what it held around each of them.

What it holds is told by Megatron-core's own sharded state, which knows nothing of how layers are moved here.
"""

import gc
import hashlib
import json
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, "")  # as with -m: providers are looked for in the working directory

from trimtab_megatron import cpu

cuda = cpu.prepare()

import groups  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import apply_factories  # noqa: E402

from trimtab.protocol import Message, Notice, Order, Reshaped, StepReport, decode, job_from_json  # noqa: E402
from trimtab_megatron import inject, train, transfer, world  # noqa: E402
from trimtab_megatron import run as runs  # noqa: E402
from trimtab_megatron.identity import RankError, identity  # noqa: E402
from trimtab_megatron.optimizer import inner_optimizers  # noqa: E402

obey, move = train.obey, transfer.move


class Recorder:
    """In place of the control connection: gives the orders of a case, and keeps what is told."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._orders = {int(step): [decode(line.encode()) for line in lines] for step, lines in case["orders"].items()}
        self._looks = case["looks"]
        self._step = 0
        self.greeted = self.connected = True
        self.told: dict[str, Any] = {name: {} for name in ("losses", "norms", "rates")}
        self.told |= {name: [] for name in ("reshaped", "notices", "around", "gone", "resident_bytes")}

    def hello(self, hello: Message) -> None:
        pass

    def send(self, message: Message) -> None:
        if isinstance(message, StepReport):
            self._step = message.step
            if message.loss is not None:
                self.told["losses"][message.step] = message.loss
                self.told["norms"][message.step] = message.gradient_norm
                self.told["rates"][message.step] = message.learning_rate
        elif isinstance(message, Reshaped):
            self.told["reshaped"].append(
                [message.refused, message.moved_bytes, message.least_bytes, message.setting.fingerprint]
            )
        elif isinstance(message, Notice):
            self.told["notices"].append(message.text)

    def take_order(self) -> Order | None:
        return self._orders[self._step][0] if self._step in self._orders else None

    def obey_all(self, run: runs.Run, _: Order) -> None:
        """All orders of this step, and what was held before and after each."""
        for order in self._orders.pop(self._step):
            before = held(run) if self._looks else {}
            chunks = [weakref.ref(chunk) for chunk in run.engine.chunks]
            obey(run, order)
            self.told["around"].append([before, held(run) if self._looks else {}])
            gc.collect()
            self.told["gone"].append(all(chunk() is None for chunk in chunks))
            self.told["resident_bytes"].append(resident_bytes())


class NotingDataset:
    """A dataset that notes which samples are taken."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def microbatch(self, indices: Any, **options: Any) -> Any:
        self.seen.extend(int(index) for index in indices)
        return self._dataset.microbatch(indices, **options)


def held(run: runs.Run) -> dict[str, Any]:
    """Digests of all parts of all tensors, by their global names and offsets; Adam's counts, loss scale, layers."""
    metadata = {
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
    }
    chunks = run.engine.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state = {
        name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    state["optimizer"] = run.engine.optimizer.sharded_state_dict(dict(state), is_loading=False, metadata=metadata)
    apply_factories(state)
    inner = [optimizer for optimizer in inner_optimizers(run.engine.optimizer) if optimizer.optimizer is not None]
    scalers = [optimizer.grad_scaler.state_dict() for optimizer in inner if getattr(optimizer, "grad_scaler", None)]
    return {
        "tensors": {
            f"{part.key} {part.global_offset}": digest(part.data)
            for part in nested_values(state)
            if isinstance(part, ShardedTensor)
        },
        "steps": sorted({float(state["step"]) for optimizer in inner for state in optimizer.optimizer.state.values()}),
        "scales": [{name: float(value) for name, value in scaler.items()} for scaler in scalers],
        "layers": [module.layer_number - 1 for chunk in chunks for module in chunk.modules() if is_layer(module)],
    }


def is_layer(module: torch.nn.Module) -> bool:
    return hasattr(module, "layer_number") and hasattr(module, "self_attention")


def digest(tensor: torch.Tensor) -> str:
    # A copy: memory that numpy has seen cannot be let go of at once.
    return hashlib.sha256(tensor.detach().clone().contiguous().view(torch.uint8).numpy()).hexdigest()[:16]


def spoilt(pieces: Any, rank: int, old: Any, new: Any, device: Any) -> None:
    """What a broken device or network would leave: one bit of one element is another."""
    move(pieces, rank, old, new, device)
    key = max(key for key in new.shards if key[1] == "exp_avg_sq")
    new.tensor(key).view(torch.int32)[-1] ^= 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_case(case: dict[str, Any], who: world.Identity, agreement: Any) -> dict[str, Any]:
    """One training, from the beginning to its last step."""
    recorder = Recorder(case)
    train.obey = recorder.obey_all
    job = job_from_json(case["job"])
    transfer.move = spoilt if case["spoils"] and who.rank == 1 else move
    run = runs.prepare(job, world.arrange(job, who, cuda, agreement, inject.parse(case["inject"])), recorder)
    noting = NotingDataset(run.dataset)
    run.dataset = noting
    error = ""
    try:
        train.train(run)
    except RankError as raised:
        error = str(raised)
    place = [run.world.tensor_rank, run.world.pipeline_rank, run.world.data_rank]
    groups.leave(agreement)
    return recorder.told | {
        "samples": noting.seen if run.world.first_stage and run.world.tensor_rank == 0 else [],
        "place": place,
        "error": error,
        "layout": run.job.parallel.layout,
    }


def main() -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    directory = Path(os.environ["CASES_DIRECTORY"])
    who = identity()
    agreement = world.join(who, cuda)
    cases = json.loads((directory / "cases.json").read_text())
    gc.freeze()  # what was imported: to look through all of that again takes as long as a step
    ended = {name: run_case(case, who, agreement) for name, case in cases.items()}
    (directory / f"{who.rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
