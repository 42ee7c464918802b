"""What collecting takes: a node's journal to its part, the parts of many nodes to one file, bytes per GPU-hour.

    .venv/bin/python benchmarks/collect.py [--nodes 512]

The figures of one node with eight GPUs are made up, with the steps and the noise of real ones: what noise compresses to
depends on how large it is, which is as good as the guess here. The parts of all nodes are copies of that node's, which
merging, that looks at no figure, cannot know. Needs 3 MB of disk a node, in the directory for temporary files; what was
just written there is still in memory. Prints; asserts nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import h5py
import numpy as np

from trimtab_slurm import journal
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices.figures import COLUMNS

GPUS, HOUR = 8, 3600

COLLECT = """
from trimtab_slurm.collect import collect_journal
from trimtab_slurm.settings import NodeSettings
collect_journal(Path(sys.argv[1]), NodeSettings(profile_root=sys.argv[2]))
"""
MERGE = """
from trimtab_slurm.merging import collect_job
collect_job(Path(sys.argv[1]))
"""
HEAD = f"{'':34}{'seconds':>9}{'CPU':>9}{'peak MB':>9}"
_MEASURED = """
import resource, sys, time
from pathlib import Path
begin = time.monotonic()
{action}
seconds = time.monotonic() - begin
cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(seconds, cpu, int(peak) * 1024)
"""


@click.command()
@click.option("--nodes", default=512, show_default=True, help="Nodes of the job.")
def main(nodes: int) -> None:
    """Print time and peak memory of collecting one hour at 1 Hz, and what each column takes in the file."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    try:
        path = make_journal(root, nodes, HOUR)
        print(f"journal of {GPUS} GPUs, one hour at 1 Hz: {path.stat().st_size / 1e6:.1f} MB")
        print(HEAD)
        measure("journal to part", COLLECT, path, root / "profiles")
        job = root / "profiles/lab/1"
        (part,) = (job / "parts").glob("*.h5")
        size = part.stat().st_size
        for number in range(1, nodes):
            copy_part(part, f"n{number}")
        measure(f"{nodes} parts to one file", MERGE, job)
        (whole,) = job.glob("[0-9]*.h5")
        measure("again, with nothing to do", MERGE, job)
        print(f"one part: {size / 1e6:.2f} MB, the file of {nodes}: {whole.stat().st_size / 1e6:.0f} MB")
        _print_columns(part, size)
    finally:
        shutil.rmtree(root)


def make_journal(root: Path, nodes: int, seconds: int) -> Path:
    """What the node n0, of so many, recorded of a job of so many seconds."""
    names = tuple(f"n{number}" for number in range(nodes))
    attempt = Attempt("lab", 1, time.time(), "n0", "root", os.getuid(), os.getgid(), 0, names, {})
    path, writer = journal.create(root / "journals", attempt, 1.0)
    begin = time.monotonic()
    series = [_series(np.random.default_rng(number), seconds) for number in range(GPUS)]
    for number in range(GPUS):
        writer.device(number, journal.DeviceRecord(f"GPU-{number}", "gpu", "H100", number, "NVML 570.1", COLUMNS))
    late = np.random.default_rng(GPUS).gamma(2.0, 2e-4, (seconds, GPUS))  # as a timer wakes up
    for second in range(seconds):
        writer.samples(
            [(number, begin + second + late[second, number], rows[second]) for number, rows in enumerate(series)]
        )
    writer.end()
    os.close(writer.descriptor)
    return path


def _series(random: np.random.Generator, seconds: int) -> np.ndarray:
    """[seconds, columns] a GPU that trains: near its limits, with the noise of a step that is no whole second."""
    load = np.sin(np.arange(seconds) / 1.7)

    def noise(middle: float, swing: float, step: float, most: float = np.inf) -> np.ndarray:
        values = middle + swing * (load + random.normal(size=seconds))
        return np.clip(np.rint(values / step), 0, most / step)

    milliwatts = noise(600e3, 20e3, 1)
    figures = {
        "utilization_ratio": noise(97, 1.5, 1, 100) / 100,
        "memory_utilization_ratio": noise(55, 4, 1, 100) / 100,
        "memory_used_bytes": 2.0**21 * (35_000 + np.where(random.random(seconds) < 0.02, 200, 0)),
        "memory_total_bytes": np.full(seconds, 85_520_809_984.0),
        "power_watts": milliwatts / 1000,
        "energy_joules": (987_654_321 + np.cumsum(milliwatts + np.rint(random.normal(0, 500, seconds)))) / 1000,
        "temperature_celsius": noise(62, 0.6, 1),
        "sm_clock_hertz": 15e6 * noise(128, 2, 1, 132),
        "memory_clock_hertz": np.full(seconds, 2_619e6),
        "pcie_sent_bytes_per_second": 1000 * noise(3e6, 5e5, 1),
        "pcie_received_bytes_per_second": 1000 * noise(5e6, 5e5, 1),
        "nvlink_sent_bytes_per_second": 1024 * noise(1e8, 1e7, 1),
        "nvlink_received_bytes_per_second": 1024 * noise(1e8, 1e7, 1),
        "throttle_reasons_bits": np.where(random.random(seconds) < 0.3, 4.0, 0.0),
        "ecc_corrected_count": np.full(seconds, 3.0),
        "ecc_uncorrected_count": np.zeros(seconds),
        "sm_active_ratio": np.clip(0.85 + 0.03 * random.normal(size=seconds), 0, 1),
        "sm_occupancy_ratio": np.clip(0.40 + 0.03 * random.normal(size=seconds), 0, 1),
        "tensor_active_ratio": np.clip(0.55 + 0.03 * random.normal(size=seconds), 0, 1),
        "dram_active_ratio": np.clip(0.50 + 0.03 * random.normal(size=seconds), 0, 1),
    }
    return np.stack([figures[column] for column in COLUMNS], axis=1)


def copy_part(part: Path, node: str) -> None:
    """Beside the part of n0, the same of another node, whose GPUs have uuids of their own."""
    copy = part.with_name(part.name.replace("n0-", f"{node}-"))
    shutil.copyfile(part, copy)
    with h5py.File(copy, "r+") as file:
        file.move("nodes/n0", f"nodes/{node}")
        devices = file[f"nodes/{node}/devices"]
        for number in range(GPUS):
            devices.move(f"GPU-{number}", f"GPU-{node}-{number}")
            devices[f"GPU-{node}-{number}"].attrs["uuid"] = f"GPU-{node}-{number}"


def measure(what: str, action: str, *arguments: Path) -> None:
    """Print what it took to carry out `action`, lines of Python, in a process of its own."""
    command = [sys.executable, "-c", _MEASURED.format(action=action), *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, cpu, peak = map(float, output.split())
    print(f"{what:34}{seconds:9.2f}{cpu:9.2f}{peak / 1e6:9.0f}", flush=True)


def _print_columns(part: Path, size: int) -> None:
    print(f"\nbytes per GPU-hour: {size / GPUS:,.0f}, of them:")
    with h5py.File(part) as file:
        devices = list(file["nodes/n0/devices"].values())
        stored = {
            column: sum(device[column].id.get_storage_size() for device in devices) / len(devices)
            for column in ("time_seconds", *COLUMNS)
        }
    for column, each in sorted(stored.items(), key=lambda item: -item[1]):
        print(f"{each:10,.0f} {column}")
    print(f"{size / GPUS - sum(stored.values()):10,.0f} names, units and the like")


if __name__ == "__main__":
    main()
