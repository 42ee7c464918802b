"""The tensors of one rank's engine, by their global names: parameters, their fp32 copies, and Adam's moments."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from trimtab_megatron.engine import Engine
from trimtab_megatron.initialize import bare, global_tensors
from trimtab_megatron.optimizer import inner_optimizers
from trimtab_megatron.shards import MAIN, MODEL, STATES, Shard

Key = tuple[str, str]
"""Name and kind."""


class Holdings:
    """What an engine holds. Tensors are flat; those of states can be missing, and are then made by `receive`."""

    def __init__(self, engine: Engine, with_states: bool) -> None:
        """Raises ValueError where two tensors of the engine have one name."""
        self.shards: dict[Key, Shard] = {}
        # A distributed optimizer keeps the model's parameters in one buffer, where they have to stay.
        self._in_buffers = engine.job.parallel.distributed_optimizer
        self._tensors: dict[Key, torch.Tensor] = {}
        self._optimized: dict[str, tuple[torch.optim.Optimizer, torch.Tensor]] = {}
        self._owners: dict[Key, torch.Tensor] = {}
        names: dict[torch.Tensor, str] = {}
        for name, tensor in global_tensors([bare(chunk) for chunk in engine.chunks]):
            if (name, MODEL) in self.shards:
                raise ValueError(f"a rank holds two tensors of the name {name}: nothing tells them apart")
            names[tensor] = name
            self._add(name, MODEL, 0, tensor)
        for parameter, main, start, optimizer in _optimized(engine.optimizer):
            name = names[parameter]
            self._optimized[name] = (optimizer, main)
            if main.dtype != parameter.dtype:
                self._add(name, MAIN, start, main)
            for kind in STATES if with_states else ():
                self.shards[name, kind] = Shard(name, kind, start, start + main.numel(), main.element_size())

    def count(self, step: float) -> None:
        """Let Adam count on from there. Each parameter gets a count of its own: each is counted up."""
        for optimizer, main in self._optimized.values() if step else ():
            if isinstance(optimizer, torch.optim.Adam):
                optimizer.state[main]["step"] = torch.tensor(step)
            else:  # Transformer Engine's and Apex's count in their groups
                for group in optimizer.param_groups:
                    group["step"] = int(step)

    def tensor(self, key: Key) -> torch.Tensor:
        """The elements of a shard, flat."""
        name, kind = key
        if kind in STATES:
            optimizer, main = self._optimized[name]
            state: torch.Tensor = optimizer.state[main][kind]
            return state.view(-1)
        return self._tensors[key]

    def receive(self, key: Key) -> torch.Tensor:
        """The same, to be filled."""
        name, kind = key
        if kind in STATES:
            optimizer, main = self._optimized[name]
            if kind not in optimizer.state[main]:
                optimizer.state[main][kind] = torch.empty_like(main.data)
        return self.tensor(key)

    def take_over(self, key: Key, other: "Holdings") -> bool:
        """Take the other's memory of the same elements instead of a copy; whether that can be."""
        name, kind = key
        if other.shards.get(key) != self.shards[key] or (kind == MODEL and self._in_buffers):
            return False
        if kind in STATES:
            optimizer, main = self._optimized[name]
            optimizer.state[main][kind] = other.tensor(key).view(main.shape)
        else:
            self._owners[key].data = other._owners[key].data
            self._tensors[key] = other._tensors[key]
        return True

    def release(self, names: set[str]) -> None:
        """Let go of the memory of these tensors."""
        for key in [key for key in self.shards if key[0] in names]:
            del self.shards[key]
            self._tensors.pop(key, None)
            if (owner := self._owners.pop(key, None)) is not None:
                owner.data = owner.data.new_empty(0)
        for name in names & set(self._optimized):
            optimizer, main = self._optimized.pop(name)
            optimizer.state.pop(main, None)

    def _add(self, name: str, kind: str, start: int, tensor: torch.Tensor) -> None:
        self._tensors[name, kind] = tensor.detach().view(-1)
        self._owners[name, kind] = tensor
        self.shards[name, kind] = Shard(name, kind, start, start + tensor.numel(), tensor.element_size())


def adam_step(engine: Engine) -> float:
    """How many steps Adam counts; 0 before the first one, and where this rank holds none of its states."""
    optimized = list(_optimized(engine.optimizer))
    counts = [optimizer.state[main].get("step", 0) for _, main, _, optimizer in optimized]
    counts += [group.get("step", 0) for *_, optimizer in optimized for group in optimizer.param_groups]
    return max(map(float, counts), default=0.0)


def _optimized(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, torch.optim.Optimizer]]:
    """Each parameter that this rank updates: what Adam knows in its place, from which of its elements on, and Adam."""
    for inner in inner_optimizers(optimizer):
        if inner.is_stub_optimizer:
            continue
        if isinstance(inner, DistributedOptimizer):
            for parameter, (group, place) in inner.model_param_group_index_map.items():
                main = inner.optimizer.param_groups[group]["params"][place]
                yield parameter, main, inner._get_model_param_range_map(parameter)["param"].start, inner.optimizer
        elif isinstance(inner, Float16OptimizerWithFloat16Params):
            for parameters, mains in (
                *zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True),
                *zip(inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups, strict=True),
            ):
                yield from (
                    (parameter, main, 0, inner.optimizer) for parameter, main in zip(parameters, mains, strict=True)
                )
        else:
            for group in inner.optimizer.param_groups:
                yield from ((parameter, parameter, 0, inner.optimizer) for parameter in group["params"])
