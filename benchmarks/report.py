"""What a report takes: the terminal's and the page of one attempt's file.

    .venv/bin/python benchmarks/report.py [--nodes 512] [--hours 1]

Nodes with eight GPUs, sampled at 1 Hz, as benchmarks/collect.py makes them up; the nodes are copies of one but for the
GPUs' uuids, and nothing was trained. Needs 3 MB of disk a node and hour, in the directory for temporary files; what was
just written there is still in memory. Prints; asserts nothing.
"""

import shutil
import tempfile
from pathlib import Path

import click
from collect import GPUS, HEAD, HOUR, copy_part, make_journal, measure

from trimtab_slurm.collect import collect_journal
from trimtab_slurm.merging import collect_job
from trimtab_slurm.settings import NodeSettings

_REPORT = """
from click.testing import CliRunner
from trimtab.cli import main
result = CliRunner().invoke(main, ["report", *sys.argv[1:]])
assert result.exit_code == 0, result.output
"""


@click.command()
@click.option("--nodes", default=512, show_default=True, help="Nodes of the job.")
@click.option("--hours", default=1, show_default=True, help="How long it ran.")
def main(nodes: int, hours: int) -> None:
    """Print time and peak memory of `trimtab report`, alone and with a page."""
    root = Path(tempfile.mkdtemp(prefix="trimtab-"))
    try:
        file, page = _file(root, nodes, hours), root / "page.html"
        print(f"{nodes} nodes, {nodes * GPUS} GPUs, {hours} h at 1 Hz: a file of {file.stat().st_size / 1e6:.0f} MB")
        print(HEAD)
        measure("terminal", _REPORT, file)
        measure("terminal and page", _REPORT, file, Path("--html"), page)
        print(f"the page: {page.stat().st_size / 1e6:.1f} MB")
    finally:
        shutil.rmtree(root)


def _file(root: Path, nodes: int, hours: int) -> Path:
    """The file of the attempt, from parts as nodes leave them."""
    collect_journal(make_journal(root, nodes, hours * HOUR), NodeSettings(profile_root=str(root / "profiles")))
    job = root / "profiles/lab/1"
    if nodes > 1:
        (part,) = (job / "parts").glob("*.h5")
        for number in range(1, nodes):
            copy_part(part, f"n{number}")
        collect_job(job)
    (file,) = job.glob("[0-9]*.h5")
    return file


if __name__ == "__main__":
    main()
