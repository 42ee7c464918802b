"""What the sampler takes from a node with eight GPUs, at several periods: CPU, memory, bytes of its journal.

    .venv/bin/python benchmarks/sampler.py [--seconds 60]

The real process, as the prolog starts it, over the tests' stub of NVML: what the real library's calls cost is not in
these figures. Needs a C compiler, and root. Prints; asserts nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from trimtab_slurm import journal
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.detach import KEPT_DESCRIPTOR
from trimtab_slurm.settings import NodeSettings, render

STUB = Path(__file__).parent.parent / "tests/slurm_plugin/nvml/stub.c"
GPUS = 8
SETTLE_SECONDS = 3.0
"""Starting Python, and looking for devices, is not sampling."""


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long each period is measured.")
def main(seconds: float) -> None:
    """Print what a sampler of eight GPUs takes at 10, 1 and 0.1 Hz."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    try:
        library = _stub(root)
        print(f"{'hertz':>6}{'CPU, % of a core':>18}{'resident, MB':>14}{'samples':>9}{'journal, kB/GPU-hour':>22}")
        for hertz in (10.0, 1.0, 0.1):
            share, resident, samples, size = _measure(root / f"{hertz:g}", library, 1 / hertz, seconds)
            hourly = size / GPUS / seconds * 3600 / 1e3
            print(f"{hertz:6g}{share * 100:18.3f}{resident / 1e6:14.1f}{samples:9d}{hourly:22.0f}")
    finally:
        shutil.rmtree(root)


def _stub(root: Path) -> Path:
    library = root / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, STUB, "-ldl"], check=True)
    gpus = [f"gpu {i} GPU-{i} {i} 00000000:{i + 1:02X}:00.0 NVIDIA_H100" for i in range(GPUS)]
    (root / "script").write_text("\n".join(["driver 570.1", *gpus, "set * GpmSupport 1", ""]))
    return library


def _measure(directory: Path, library: Path, period: float, seconds: float) -> tuple[float, int, int, int]:
    """CPU seconds a second, resident bytes, samples of all devices, and bytes of journal, once it has settled."""
    state = directory / "run"
    state.mkdir(parents=True)
    config = directory / "node.toml"
    config.write_text(render(NodeSettings(profile_root=str(directory / "profiles"), nvml_library=str(library))))
    now = time.time()
    held = {"SLURM_JOB_GPUS": ",".join(map(str, range(GPUS)))}
    attempt = Attempt("lab", 1, now, "n1", "root", os.getuid(), os.getgid(), 0, ("n1",), held)
    path, writer = journal.create(directory / "journals", attempt, period)
    os.dup2(writer.descriptor, KEPT_DESCRIPTOR)
    command = [sys.executable, "-I", "-m", "trimtab_slurm.sampler", path, state, config]
    process = subprocess.Popen(command, pass_fds=[KEPT_DESCRIPTOR])
    try:
        time.sleep(SETTLE_SECONDS)
        cpu, size = _cpu_seconds(process.pid), path.stat().st_size
        time.sleep(seconds)
        share = (_cpu_seconds(process.pid) - cpu) / seconds
        resident = _resident_bytes(process.pid)
        recorded = journal.parse(path.read_bytes())
        samples = sum(len(device.times) for device in recorded.devices)
        return share, resident, samples, path.stat().st_size - size
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(writer.descriptor)


def _cpu_seconds(pid: int) -> float:
    """By the scheduler's own count, in nanoseconds: clock ticks are too coarse."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
