"""What accelerators can do: the figures of their data sheets, and the share of them that real programs reach.

Data sheets give peaks. No program reaches them, so every time worked out here rests on four shares and the time of a
launch that are assumed, the same for all accelerators: they are stated in one place (`Achievable`) and belong into
every output that uses them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Achievable:
    """The share of a peak that large, well-shaped work reaches, and what small work takes. Assumed, not measured."""

    matmul_ratio: float = 0.65
    """Of the arithmetic peak, in matrix products. Megatron-LM reports 47 % of the peak for whole training steps on
    H100 (its README), in which matrix products alone must do better; small ones do worse."""
    attention_ratio: float = 0.45
    """Of the arithmetic peak, in fused attention. FlashAttention-2 reaches about 35 %, FlashAttention-3 up to 75 % of
    an H100 (Shah et al. 2024, abstract); the backward is below the forward in both."""
    memory_ratio: float = 0.80
    """Of the memory bandwidth, in element-wise work."""
    link_ratio: float = 0.75
    """Of a link's bandwidth."""
    launch_seconds: float = 5e-6
    """Of one kernel, by the host. It is hidden where the device takes longer."""


@dataclass(frozen=True)
class Accelerator:
    """One device, and its links in the server that it is usually sold in. Bandwidths of links are one way."""

    name: str
    flops_per_second: float
    """Dense matrix products in bf16; on a CPU in fp32."""
    memory_bytes: float
    """As the data sheet says, in units of 1e9. Drivers report about 7 % more, which is left to the CUDA context,
    NCCL's buffers and the allocator's fragments."""
    memory_bytes_per_second: float
    peer_bytes_per_second: float
    """To one other device of the node."""
    node_bytes_per_second: float
    """To all other devices of the node together."""
    network_bytes_per_second: float
    """To other nodes."""
    host_bytes_per_second: float
    """To the host's memory."""
    host_memory_bytes_per_second: float
    """This device's share of the bandwidth of the host's own memory."""
    source: str
    """Where the figures are from."""
    achievable: Achievable = field(default_factory=Achievable)
    node_latency_seconds: float = 3e-6
    """Of one hop inside the node. Assumed."""
    network_latency_seconds: float = 10e-6
    """Of one hop between nodes. Assumed."""

    @property
    def only_proportions(self) -> bool:
        """Whether it stands for any CPU: then its seconds mean nothing but what parts cost relative to one another."""
        return math.isinf(self.memory_bytes)

    def among_bytes_per_second(self, devices: int) -> float:
        """What one device sends to `devices` - 1 others of its node together."""
        return min(self.node_bytes_per_second, max(1, devices - 1) * self.peer_bytes_per_second)


def _nvidia(
    name: str,
    tera_flops: float,
    memory: float,
    bandwidth: float,
    nvlink: float,
    network: float,
    pcie: float,
    host_memory: float,
) -> Accelerator:
    """With switched NVLink: the whole bandwidth to any one peer. All but the first in units of 1e9."""
    return Accelerator(
        name=name,
        flops_per_second=tera_flops * 1e12,
        memory_bytes=memory * 1e9,
        memory_bytes_per_second=bandwidth * 1e9,
        peer_bytes_per_second=nvlink * 1e9,
        node_bytes_per_second=nvlink * 1e9,
        network_bytes_per_second=network * 1e9,
        host_bytes_per_second=pcie * 1e9,
        host_memory_bytes_per_second=host_memory * 1e9,
        source=f"NVIDIA's data sheets of the {name} and of the DGX with eight of them",
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        # Host memory: two sockets of eight channels, DDR4-3200, DDR5-4800, DDR5-5600, over eight GPUs.
        "a100-40": _nvidia("A100 40GB SXM", 312, 40, 1555, 300, 25, 32, 51.2),
        "a100-80": _nvidia("A100 80GB SXM", 312, 80, 2039, 300, 25, 32, 51.2),
        "h100": _nvidia("H100 SXM", 989.4, 80, 3350, 450, 50, 64, 76.8),
        "h200": _nvidia("H200 SXM", 989.4, 141, 4800, 450, 50, 64, 76.8),
        "b200": _nvidia("B200", 2250, 180, 8000, 900, 50, 64, 89.6),
        "mi300x": Accelerator(
            name="Instinct MI300X",
            flops_per_second=1307.4e12,
            memory_bytes=192e9,
            memory_bytes_per_second=5300e9,
            peer_bytes_per_second=64e9,  # one of seven links, to each of the seven peers
            node_bytes_per_second=448e9,
            network_bytes_per_second=50e9,
            host_bytes_per_second=64e9,
            host_memory_bytes_per_second=76.8e9,
            source="AMD's data sheets of the Instinct MI300X and of its platform of eight; 400 Gb/s to other nodes",
        ),
        "cpu": Accelerator(
            name="CPU rank",
            flops_per_second=50e9,
            memory_bytes=math.inf,
            memory_bytes_per_second=10e9,
            peer_bytes_per_second=2e9,
            node_bytes_per_second=2e9,
            network_bytes_per_second=1e9,
            host_bytes_per_second=10e9,
            host_memory_bytes_per_second=10e9,
            source="assumed, in the proportions of one core of a server; only what parts cost relative to one another",
            node_latency_seconds=50e-6,
            network_latency_seconds=100e-6,
        ),
    }
)
"""By the name that a command takes."""
