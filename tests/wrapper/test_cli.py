import subprocess
import sys

MODULES_OF_NO_USE_TO_HELP = {"torch", "numpy", "h5py", "plotly", "rich", "jinja2", "asyncio"}


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from trimtab.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('IMPORTED', *sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    imported = set(output.split("IMPORTED ")[1].split())
    assert not imported & MODULES_OF_NO_USE_TO_HELP


def test_run_outside_a_job_says_how_to_get_into_one(tmp_path, monkeypatch):
    job_file = tmp_path / "job.toml"
    job_file.write_text("")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ended = subprocess.run([sys.executable, "-m", "trimtab", "run", job_file], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "trimtab submit" in ended.stderr
