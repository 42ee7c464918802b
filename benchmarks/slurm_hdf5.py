"""One job, profiled by trimtab's hooks and by Slurm's own HDF5 plugin at once: what each wrote of it.

    ./apt-install benchmarks && .venv/bin/python benchmarks/slurm_hdf5.py [--seconds 60]

Two nodes, four tasks: one computes, one sleeps, one computes and sleeps in turns, one holds 100 MB. Prints; asserts
nothing.
"""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

import click
import h5py

from trimtab import sandbox as boxes
from trimtab.sandbox import config
from trimtab.sandbox.config import Places
from trimtab_slurm import directories, profile

TASKS = """\
#!/bin/sh
compute() {{ timeout $1 sh -c 'while :; do :; done'; }}
case $SLURM_PROCID in
0) compute {seconds:g} ;;
1) sleep {seconds:g} ;;
2) for half in 1 2; do compute {quarter:g}; sleep {quarter:g}; done ;;
3) python3 -c 'import time; held = bytes(range(250)) * 400000; time.sleep({seconds:g})' ;;
esac
exit 0
"""
PLUGIN = """
AcctGatherProfileType=acct_gather_profile/hdf5
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
"""


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="How long the job runs.")
def main(seconds: float) -> None:
    """Run the job under both, and print their files side by side."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    root.chmod(0o755)
    places = Places(root / "box")
    try:
        sandbox = _up(places)
        job_id = _run(sandbox, root, seconds)
        merged = root / "merged.h5"
        subprocess.run(
            ["sh5util", "-j", str(job_id), "-o", merged], env=sandbox.environment, stderr=subprocess.DEVNULL, check=True
        )
        _print(merged, _ours(places, job_id))
    finally:
        boxes.down(places.directory)
        shutil.rmtree(root)


def _up(places: Places) -> boxes.Sandbox:
    """A sandbox whose Slurm has the plugin, which daemons look for as they start."""
    plain = config.slurm_conf

    def with_plugin(spec: boxes.Spec, places: Places, host: str, ports: tuple[int, ...]) -> str:
        (places.directory / "acct_gather.conf").write_text(
            f"ProfileHDF5Dir={places.directory}/hdf5\nProfileHDF5Default=Task\n"
        )
        return plain(spec, places, host, ports) + PLUGIN

    with mock.patch.object(config, "slurm_conf", with_plugin):
        sandbox, _ = boxes.up(places.directory, boxes.Spec(nodes=2))
    return sandbox


def _run(sandbox: boxes.Sandbox, root: Path, seconds: float) -> int:
    """The id of the job, once it is over."""
    tasks = root / "tasks"
    tasks.write_text(TASKS.format(seconds=seconds, quarter=seconds / 4))
    tasks.chmod(0o755)
    command = ["srun", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--profile=task", "--acctg-freq=task=1"]
    script = f"#!/bin/sh\nexec {' '.join(command)} {tasks}\n"
    submit = ["sbatch", "--parsable", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output=/dev/null"]
    done = subprocess.run(submit, input=script, env=sandbox.environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def _ours(places: Places, job_id: int) -> Path:
    """The one file of the job, once the nodes have written it."""
    directory = directories.job_directory(places.profiles, "sandbox", job_id)
    while not (found := list(directory.glob("[!.]*.h5"))):
        time.sleep(0.1)
    return found[0]


def _print(merged: Path, ours: Path) -> None:
    print(f"{'task':>4}  {'':8}{'samples':>8}{'CPU seconds':>13}{'most memory, MB':>17}")
    devices = {device.index: device.samples for node in profile.read(ours).nodes for device in node.devices}
    with h5py.File(merged) as file:
        theirs = {
            int(name.removeprefix("Task_")): series[...]
            for node in file["Steps/0/Nodes"].values()
            for name, series in node["Tasks"].items()
        }
    for task, samples in sorted(devices.items()):
        rows = theirs[task]
        mine = (len(samples["time_seconds"]), samples["cpu_seconds"].max(), samples["memory_used_bytes"].max() / 1e6)
        slurms = (len(rows), rows["CPUTime"].sum(), rows["RSS"].max() * 1024 / 1e6)
        for name, figures in (("trimtab", mine), ("Slurm", slurms)):
            print(f"{task:>4}  {name:8}{figures[0]:8d}{figures[1]:13.2f}{figures[2]:17.1f}")
    print(f"\ntrimtab, {ours.stat().st_size:,} bytes: {', '.join(sorted(devices[0]))}")
    print(f"Slurm, {merged.stat().st_size:,} bytes: {', '.join(theirs[0].dtype.names)}")


if __name__ == "__main__":
    main()
