"""Where the ranks of a shape are, and what they talk over: links between stages, and the order of nodes. Pure.

Ranks count tensor-parallel ranks first, then replicas, then stages, as Megatron-core does; each node takes as many in
turn as it has GPUs. So tensor-parallel ranks share a node where their number divides its GPUs, and a stage is spread
over as many nodes as it needs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations

from trimtab.balance.model.accelerators import Accelerator
from trimtab.balance.plan import Link
from trimtab.protocol import Shape

MOST_NODES_IN_EVERY_ORDER = 7
"""Of so many, every order is tried: 5,040."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of one size."""

    accelerator: Accelerator
    gpus: int
    gpus_per_node: int = 8
    latency_seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Between two nodes (the lower first), where it is known to differ from the accelerator's network."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(f"{self.gpus} GPUs in nodes of {self.gpus_per_node}: both must be 1 or more")
        for low, high in self.latency_seconds:
            if not 0 <= low < high < self.nodes:
                raise ValueError(f"a link between nodes {low} and {high}: nodes are 0 to {self.nodes - 1}, lower first")

    @property
    def nodes(self) -> int:
        """How many are needed."""
        return math.ceil(self.gpus / self.gpus_per_node)

    def splits(self, tensor: int) -> bool:
        """Whether some group of tensor-parallel ranks is on two nodes or more."""
        return self.nodes > 1 and self.gpus_per_node % tensor != 0

    def link(self, one: int, other: int) -> Link:
        """From a GPU of a node to one of another, or of the same."""
        accelerator, share = self.accelerator, self.accelerator.achievable.link_ratio
        if one == other:
            return Link(accelerator.node_latency_seconds, share * accelerator.peer_bytes_per_second)
        pair = (min(one, other), max(one, other))
        latency = self.latency_seconds.get(pair, accelerator.network_latency_seconds)
        return Link(latency, share * accelerator.network_bytes_per_second)


@dataclass(frozen=True)
class Placement:
    """A shape on a cluster."""

    cluster: Cluster
    shape: Shape
    interleaved: bool
    """Whether the last stage hands microbatches on to the first."""
    order: tuple[int, ...]
    """The node that takes each share of the ranks, in the order of ranks."""

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """[S] from each stage to the next, the last to the first: the slowest of all replicas and tensor ranks."""
        return tuple(self._slowest(self._stage_pairs(stage)) for stage in range(self.shape.pipeline))

    @cached_property
    def replica_link(self) -> Link:
        """The slowest between neighbors in the ring of a stage's replicas."""
        return self._slowest(self._replica_pairs())

    def latencies(self) -> list[float]:
        """Of all links that are used, each once."""
        steps = range(self.shape.pipeline - (not self.interleaved))
        pairs = self._replica_pairs().union(*(self._stage_pairs(stage) for stage in steps))
        nodes = {frozenset((self.order[one], self.order[other])) for one, other in pairs}
        return [self.cluster.link(min(pair), max(pair)).latency_seconds for pair in nodes]

    def _share(self, tensor_rank: int, replica: int, stage: int) -> int:
        """Which share of the ranks, a node's worth, a rank is in."""
        rank = tensor_rank + self.shape.tensor * (replica + self.shape.data * stage)
        return rank // self.cluster.gpus_per_node

    def _stage_pairs(self, stage: int) -> set[tuple[int, int]]:
        after = (stage + 1) % self.shape.pipeline
        return {
            (self._share(rank, replica, stage), self._share(rank, replica, after))
            for replica in range(self.shape.data)
            for rank in range(self.shape.tensor)
        }

    def _replica_pairs(self) -> set[tuple[int, int]]:
        data = self.shape.data
        return {
            (self._share(0, replica, stage), self._share(0, (replica + 1) % data, stage))
            for stage in range(self.shape.pipeline)
            for replica in range(data)
        }

    def _slowest(self, shares: set[tuple[int, int]]) -> Link:
        if not self.cluster.latency_seconds:  # then links are of two kinds alone
            shares = {
                min(shares, key=lambda pair: pair[0] == pair[1]),
                max(shares, key=lambda pair: pair[0] == pair[1]),
            }
        links = [self.cluster.link(self.order[one], self.order[other]) for one, other in shares]
        return Link(max(link.latency_seconds for link in links), min(link.bytes_per_second for link in links))


def place(cluster: Cluster, shape: Shape, interleaved: bool, slow_link_seconds: float) -> Placement:
    """Place a shape so that it uses as few links above `slow_link_seconds` as it can, then as little latency.

    Of up to seven nodes the best order; of more one that no exchange of two nodes makes better.
    """

    def toll(order: tuple[int, ...]) -> tuple[int, float]:
        latencies = Placement(cluster, shape, interleaved, order).latencies()
        return sum(latency > slow_link_seconds for latency in latencies), sum(latencies)

    order = tuple(range(cluster.nodes))
    if cluster.latency_seconds and cluster.nodes <= MOST_NODES_IN_EVERY_ORDER:
        order = min(permutations(order), key=toll)
    elif cluster.latency_seconds:
        order = _exchanged(order, toll)
    return Placement(cluster, shape, interleaved, order)


def _exchanged(order: tuple[int, ...], toll: Callable[[tuple[int, ...]], tuple[int, float]]) -> tuple[int, ...]:
    while True:
        better = min((_swap(order, *pair) for pair in combinations(range(len(order)), 2)), key=toll)
        if toll(better) >= toll(order):
            return order
        order = better


def _swap(order: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    swapped = list(order)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return tuple(swapped)
