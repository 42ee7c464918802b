"""From a job id or a file to its attempts, and the command that shows them."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from trimtab.cli import main
from trimtab.report.find import ReportError, load
from trimtab_slurm import journal
from trimtab_slurm import profile as profile_file
from trimtab_slurm.attempt import Attempt as NodeAttempt


@pytest.fixture
def root(tmp_path):
    return tmp_path / "profiles"


def leave(root, profile, name, *, merged=False):
    """Write a part, or a merged profile, where a run would."""
    directory = root / profile.cluster / str(profile.job_id)
    target = directory / name if merged else directory / "parts" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    profile_file.write(target, profile)
    return target


def leave_parts(root, profile):
    for node in profile.nodes:
        leave(root, dataclasses.replace(profile, nodes=(node,), training=None), f"{node.node}.h5")
    leave(root, dataclasses.replace(profile, nodes=()), "training.h5")


def later(profile, seconds, restart_count):
    """The attempt after: the same run, so much later."""
    moved = dataclasses.replace(
        profile,
        start_seconds=profile.start_seconds + seconds,
        end_seconds=profile.end_seconds + seconds,
        restart_count=restart_count,
    )
    return dataclasses.replace(moved, nodes=())


def refused(*arguments):
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


def test_the_parts_of_a_job_become_one_report(root, profile):
    leave_parts(root, profile)
    (found,) = load("42", None, root)
    assert found.summary.training.measured_steps == 30
    assert [device.ranks for device in found.summary.devices] == [(0,), (1,), (2,), (3,)]
    assert found.summary.missing_nodes == ()


def test_a_file_is_read_as_it_is(tmp_path, profile):
    file = tmp_path / "one.h5"
    profile_file.write(file, profile)
    (found,) = load(str(file), None, None)
    assert found.summary.job_id == 42
    assert found.summary.attempts == ()


def test_the_newest_attempt_is_shown_and_the_chain_is_listed(root, profile, profiles):
    first = profiles.change(later(profile, 0, 0), attributes={"exit_code": 75, "outcome": "stopped at step 9 of 30"})
    leave(root, first, "training-1.h5")
    leave(root, later(profile, 1000, 1), "training-2.h5")
    (found,) = load("42", None, root)
    assert found.summary.restart_count == 1
    assert [(one.number, one.state) for one in found.summary.attempts] == [(1, "stopped"), (2, "finished")]
    assert (found.summary.attempt_number, found.summary.previous) == (2, "20260528T202640Z.h5")
    (older,) = load("42", "1", root)
    assert older.summary.outcome.sentence == "stopped at step 9 of 30"
    assert (older.summary.attempt_number, older.summary.previous) == (1, "")
    assert [recorded.summary.restart_count for recorded in load("42", "all", root)] == [0, 1]


def test_the_attempt_before_is_said_in_terminal_and_page(root, profile, profiles, tmp_path):
    first = profiles.change(later(profile, 0, 0), attributes={"exit_code": 75, "outcome": "stopped at step 9 of 30"})
    leave(root, first, "training-1.h5")
    leave(root, later(profile, 1000, 1), "training-2.h5")
    page = tmp_path / "page.html"
    command = CliRunner().invoke(main, ["report", "42", "--profiles", str(root), "--html", str(page)])
    assert command.exit_code == 0
    sentence = "ttempt 2 of 2; the one before: stopped at step 9 of 30"
    assert f"A{sentence}" in command.stdout
    assert f"a{sentence}" in page.read_text()
    alone = CliRunner().invoke(main, ["report", str(root / "lab/42/20260528T204320Z-restart1.h5")])
    assert "Attempt 2; the one before is in 20260528T202640Z.h5" in alone.stdout
    only = CliRunner().invoke(main, ["report", "42", "--profiles", str(root), "--attempt", "1"])
    assert "Attempt 1 of 2\n" in only.stdout


def test_an_earlier_job_of_the_same_id_is_another_chain(root, profile):
    weeks = 21 * 86400
    leave(root, later(profile, 0, 0), "training-1.h5")
    leave(root, later(profile, 1000, 1), "training-2.h5")
    leave(root, later(profile, weeks, 0), "training-3.h5")
    (found,) = load("42", "all", root)
    assert [attempt.number for attempt in found.summary.attempts] == [1]
    assert (found.summary.start_seconds, found.summary.previous) == (profile.start_seconds + weeks, "")
    with pytest.raises(ReportError, match=r"choose from 1 to 1, or all; of an earlier job of this id, name the file: "):
        load("42", "2", root)
    (earlier,) = load(str(root / "lab/42/20260528T202640Z.h5"), None, None)
    assert earlier.summary.start_seconds == profile.start_seconds


def test_a_part_that_was_left_out_is_among_the_events(root, profile):
    leave_parts(root, profile)
    (root / "lab/42/parts/n2-20260528T202640Z.h5").write_bytes(b"cut")
    (found,) = load("42", None, root)
    (event,) = (event for event in found.summary.events if event.source == "profile")
    assert (event.kind, "n2-20260528T202640Z.h5 is no profile" in event.text) == ("part", True)


@pytest.mark.parametrize("attempt", ["0", "3", "x", "-1"])
def test_an_attempt_that_is_not_there_is_refused(root, profile, attempt):
    leave(root, later(profile, 0, 0), "training-1.h5")
    with pytest.raises(ReportError, match=f"job 42 has no attempt {attempt}; choose from 1 to 1, or all"):
        load("42", attempt, root)


def test_an_unknown_job_is_refused_with_the_places_looked_at(root):
    assert f"job 43: no profile below {root}; pass --profiles DIR" in refused(43, "--profiles", root)


def test_a_job_without_a_profile_yet_is_told(root):
    (root / "lab/42/parts").mkdir(parents=True)
    assert "job 42: nothing is recorded" in refused(42, "--profiles", root)


def test_one_id_on_two_clusters_is_not_guessed(root, profile):
    leave_parts(root, profile)
    leave_parts(root, dataclasses.replace(profile, cluster="other"))
    message = refused(42, "--profiles", root)
    assert "several clusters" in message
    assert str(root / "lab/42") in message


@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n" + bytes(500)])
def test_a_damaged_file_is_refused(tmp_path, content):
    file = tmp_path / "bad.h5"
    file.write_bytes(content)
    assert f"{file} is no profile, or damaged" in refused(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "none.h5 does not exist" in refused(tmp_path / "none.h5")


def test_a_file_cut_short_is_refused(tmp_path, profile):
    file = tmp_path / "cut.h5"
    profile_file.write(file, profile)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "damaged" in refused(file)


def test_a_damaged_attempt_does_not_hide_the_others(root, profile):
    leave(root, later(profile, 1000, 1), "training-2.h5")
    (root / "lab/42/20200101T000000Z.h5").write_bytes(b"cut")
    (found,) = load("42", None, root)
    assert [one.state for one in found.summary.attempts] == ["damaged", "finished"]


@pytest.fixture
def open_root():
    """A profile root that other users can enter, as they cannot pytest's own directories."""
    with tempfile.TemporaryDirectory(prefix="trimtab-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def give_away(directory):
    for path in (directory, *directory.rglob("*")):
        os.chown(path, 12345, 12345)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_root_merges_another_users_parts_as_that_user(open_root, profile):
    leave_parts(open_root, profile)
    give_away(open_root / "lab/42")
    (found,) = load("42", None, open_root)
    assert found.file.stat().st_uid == 12345


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_root_is_not_led_elsewhere_by_another_users_directory(open_root, profile):
    leave_parts(open_root, profile)
    give_away(open_root / "lab/42")
    (open_root / "lab/42").rename(open_root / "elsewhere")
    (open_root / "elsewhere").chmod(0o555)
    (open_root / "lab/42").mkdir(mode=0o755)
    (open_root / "lab/42/parts").symlink_to(open_root / "elsewhere/parts")
    os.chown(open_root / "elsewhere", 0, 0)
    os.chown(open_root / "lab/42", 12345, 12345)
    before = sorted((open_root / "elsewhere").rglob("*"))
    load("42", None, open_root)  # what the user may read, that user's own file may hold
    assert sorted((open_root / "elsewhere").rglob("*")) == before
    assert {path.lstat().st_uid for path in (open_root / "lab/42").glob("*.h5")} == {12345}


@pytest.mark.skipif(os.geteuid() != 0, reason="journals are root's")
def test_root_collects_what_a_dead_sampler_left_of_the_job(open_root, monkeypatch):
    config = open_root / "node.toml"
    config.write_text(f'profile_root = "{open_root}/profiles"\njournal_directory = "{open_root}/journals"\n')
    monkeypatch.setenv("TRIMTAB_NODE_CONFIG", str(config))
    for job_id in (42, 421):
        attempt = NodeAttempt("lab", job_id, 1e9, "n1", "ann", 12345, 12345, 0, ("n1", "n2"), {})
        _, writer = journal.create(open_root / "journals", attempt, 1.0)
        os.close(writer.descriptor)
    (found,) = load("42", None, None)
    assert found.summary.missing_nodes == ("n2",)
    assert found.file.stat().st_uid == 12345
    (left,) = (open_root / "journals").iterdir()
    assert left.name.startswith("lab.421.n1.")


def test_profiles_are_found_where_node_toml_says(root, profile, tmp_path, monkeypatch):
    leave_parts(root, profile)
    config = tmp_path / "node.toml"
    config.write_text(f'profile_root = "{root}"\njournal_directory = "{tmp_path}/journals"\n')
    monkeypatch.setenv("TRIMTAB_NODE_CONFIG", str(config))
    result = CliRunner().invoke(main, ["report", "42"])
    assert result.exit_code == 0
    assert not (tmp_path / "journals").exists()  # a report makes no node of where it runs
    assert result.stdout.startswith("Job 42 finished: trained to step 30\n")


def test_json_is_the_only_output_beside_a_page(root, profile, tmp_path):
    leave_parts(root, profile)
    target = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", "42", "--profiles", str(root), "--json", "--html", str(target)])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["job_id"] == 42
    assert result.stderr.strip() == f"Page: {target}"
    assert target.read_text().startswith("<!doctype html>")


def test_a_page_of_several_attempts_is_refused(root, profile, tmp_path):
    leave(root, later(profile, 0, 0), "training-1.h5")
    leave(root, later(profile, 1000, 1), "training-2.h5")
    message = refused(42, "--profiles", root, "--attempt", "all", "--html", tmp_path / "page.html")
    assert "choose it with --attempt N" in message


def test_a_page_that_cannot_be_written_is_refused(root, profile, tmp_path):
    leave_parts(root, profile)
    assert "No such file or directory" in refused(42, "--profiles", root, "--html", tmp_path / "no/page.html")
