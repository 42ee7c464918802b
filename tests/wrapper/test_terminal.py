import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from trimtab.terminal import bullet, ruled_table, show_parts
from trimtab_slurm import profile as profile_file

COMMANDS = (["plan"], ["diagnose"], ["report"], ["simulate", "--preset", "70b", "--gpus", "8", "--pipeline", "8"])
ON_FILES = ("plan", "diagnose", "report")


@pytest.fixture
def run(tmp_path, profile):
    """Runs a command with its output going to a file descriptor; with the profile of a job where it takes one."""
    file = tmp_path / "attempt.h5"
    profile_file.write(file, profile)

    def run(command, output, *options):
        arguments = [*command, *([file] if command[0] in ON_FILES else []), *options]
        return subprocess.run(
            [sys.executable, "-m", "trimtab", *arguments], stdout=output, stderr=subprocess.PIPE, text=True
        )

    return run


def test_lines_that_are_not_for_a_terminal_end_with_their_text():
    table = ruled_table()
    table.add_column("change")
    table.add_column("verdict")
    table.add_row("move layers", "worth it")
    table.add_row("nothing", "")
    output = io.StringIO()
    show_parts([Text("two  blanks "), table, bullet("of a list")], output)
    lines = output.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("two  blanks", "- of a list")
    assert [line.rstrip() for line in lines] == lines


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_full_device_is_told_in_a_line(run, command, options):
    with Path("/dev/full").open("w") as full:
        ended = run(command, full, *options)
    assert ended.stderr == "trimtab: the output cannot be written: No space left on device\n"
    assert ended.returncode == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_pipe_that_nobody_reads_is_left_in_silence(run, command, options):
    reader, writer = os.pipe()
    os.close(reader)
    ended = run(command, writer, *options)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
