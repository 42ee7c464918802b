"""The attacker: a user whose jobs are profiled, with all that a user can put where root comes by.

Root runs these; ANN is the attacker, BOB has secrets, and both are no more than ids.
"""

import grp
import json
import os
import re
import resource
import signal
import stat
import struct
import time
from dataclasses import replace
from functools import partial

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from trimtab.cli import main as trimtab
from trimtab_slurm import as_user, directories, journal
from trimtab_slurm.as_user import as_user as run_as
from trimtab_slurm.collect import CollectError, collect_journal, recover
from trimtab_slurm.contents import ProfileError
from trimtab_slurm.merging import collect_job
from trimtab_slurm.profile import read, read_header, write
from trimtab_slurm.settings import NodeSettings, load_or_default

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

ANN, BOB, EVE = 1000, 2000, 3000
SECRET = b"a secret\n"
HOSTILE = "\x1b[31m<script>alert(1)</script>\x1b]0;owned\x07\r\n<img src=x onerror=alert(2)>\u202e"


def forked(uid, action, groups=()):
    """Start a process of another user; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def works_as(uid, action, groups=()):
    """Whether another user can do something."""
    return os.waitpid(forked(uid, action, groups), 0)[1] == 0


class Site:
    """A node with a journal of ANN's job to be collected, and files that she must not reach."""

    def __init__(self, root, attempt):
        self.root, self.attempt = root, replace(attempt, uid=ANN, gid=ANN, expected_nodes=("n1",))
        self.settings = NodeSettings(journal_directory=str(root / "journals"), profile_root=str(root / "profiles"))
        self.job = root / "profiles/lab/7"
        self.parts = self.job / "parts"
        self.secret = root / "secret"
        self.secret.write_bytes(SECRET)
        self.secret.chmod(0o600)
        self.bobs = root / "bobs"
        self.bobs.mkdir(0o755)
        os.chown(self.bobs, BOB, BOB)

    def journal(self, **fields):
        """A journal as root's sampler leaves it; returns its path."""
        path, writer = journal.create(self.root / "journals", replace(self.attempt, **fields), 1.0)
        writer.device(0, journal.DeviceRecord("gpu-a", "gpu", "H100", 0, "NVML", ("power_watts",)))
        writer.samples([(0, time.monotonic(), (300.0,))])
        writer.end()
        os.close(writer.descriptor)
        return path

    def make_directory(self):
        directories.make_job_directory(self.root / "profiles", "lab", 7, ANN, ANN)

    def part_name(self, path):
        """The name that the part of a journal will have: no secret."""
        self.collect(path, self.root / "elsewhere")
        (part,) = (self.root / "elsewhere/lab/7/parts").iterdir()
        return part.name

    def collect(self, path, root):
        copy = path.with_name(f"copy{journal.SUFFIX}")
        copy.write_bytes(path.read_bytes())
        assert collect_journal(copy, replace(self.settings, profile_root=str(root)))

    def is_unharmed(self):
        status = self.secret.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode), self.secret.read_bytes()) == (0, 0o600, SECRET)
        assert list(self.bobs.iterdir()) == []
        return True


@pytest.fixture
def site(open_path, attempt):
    return Site(open_path, attempt)


def test_what_a_user_owns_is_written_as_that_user_who_cannot_become_root_again(site):
    seen = site.root / "seen"
    seen.mkdir()
    os.chown(seen, ANN, ANN)

    def look():
        ids = [*os.getresuid(), *os.getresgid()], os.getgroups()
        (seen / "ids").write_text(json.dumps(ids))
        with pytest.raises(PermissionError):
            os.setuid(0)

    run_as(ANN, ANN, look)
    assert json.loads((seen / "ids").read_text()) == [[ANN] * 6, []]
    assert (seen / "ids").stat().st_uid == ANN


def test_a_collector_that_its_user_stops_does_not_keep_root_waiting(monkeypatch):
    monkeypatch.setattr(as_user, "LONGEST_SECONDS", 0.2)
    with pytest.raises(OSError, match=r"as user 1000: not done within 0\.2 s"):
        run_as(ANN, ANN, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.parametrize("target", ["root's", "bob's"])
def test_parts_that_lead_elsewhere_are_not_followed(site, target):
    elsewhere = site.bobs
    if target == "root's":
        os.chown(elsewhere, 0, 0)
    site.make_directory()
    path = site.journal()
    site.parts.rmdir()
    site.parts.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"as user 1000: .*Permission denied"):
        collect_journal(path, site.settings)
    assert site.is_unharmed()
    assert path.exists()


def test_a_directory_swapped_between_look_and_use_gains_nothing(site):
    """ANN swaps her parts for a link to BOB's directory, and back, as fast as she can, while root collects."""
    site.make_directory()
    aside, link = site.job / "aside", site.job / "link"

    def swap():
        link.symlink_to(site.bobs)
        while True:
            site.parts.rename(aside)
            link.rename(site.parts)
            site.parts.rename(link)
            aside.rename(site.parts)

    child = forked(ANN, swap)
    try:
        outcomes = set()
        for _ in range(20):
            path = site.journal()
            try:
                outcomes.add(collect_journal(path, site.settings))
            except OSError as error:
                outcomes.add(type(error))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert site.is_unharmed()
    assert True in outcomes
    assert {status.st_uid for path in site.job.rglob("*") if (status := path.lstat())} == {ANN}


@pytest.mark.parametrize("trap", [os.symlink, os.link])
def test_a_link_to_roots_file_where_a_profile_goes_is_replaced_and_not_written_through(site, trap):
    path = site.journal()
    name = site.part_name(path)
    site.make_directory()
    start = read_header(site.root / "elsewhere/lab/7/parts" / name).start_seconds
    merged = site.job / time.strftime("%Y%m%dT%H%M%SZ.h5", time.gmtime(start))
    for place in (site.parts / name, merged):
        trap(site.secret, place)
    assert collect_journal(path, site.settings)
    assert site.is_unharmed()
    for place in (site.parts / name, merged):
        assert not place.is_symlink()
        assert read(place).user == "ann"
        assert (place.stat().st_uid, place.stat().st_nlink) == (ANN, 1)


def test_what_lies_in_place_of_a_part_neither_hangs_nor_leaks(site, make_part):
    site.make_directory()
    write(site.parts / "n1-a.h5", make_part())
    bobs = site.root / "bobs.h5"
    write(bobs, make_part("n3"))
    os.chown(bobs, BOB, BOB)
    os.mkfifo(site.parts / "n2-20260528T202640Z.h5")
    (site.parts / "n3-20260528T202640Z.h5").symlink_to(bobs)
    (site.parts / "n4-20260528T202640Z.h5").mkdir()
    (site.parts / "n5-20260528T202640Z.h5").symlink_to("/dev/zero")
    for path in site.parts.iterdir():
        os.chown(path, ANN, ANN, follow_symlinks=False)
    (path,) = collect_job(site.job)
    found = read(path)
    assert [node.node for node in found.nodes] == ["n1"]
    assert [re.search(r"n\d-.*", event.text)[0] for event in found.events] == [
        "n2-20260528T202640Z.h5 is no profile: it is no regular file",
        "n3-20260528T202640Z.h5 cannot be read: Permission denied",
        "n4-20260528T202640Z.h5 is no profile: it is no regular file",
        "n5-20260528T202640Z.h5 is no profile: it is no regular file",
    ]


def external_link(group, secret):
    group["loss"] = h5py.ExternalLink(str(secret), "/training/steps/loss")


def soft_link(group, secret):
    group["loss"] = h5py.SoftLink("/training/steps/step")


def external_values(group, secret):
    group.create_dataset("loss", (1,), "i8", external=[(str(secret), 0, 8)])


def virtual_values(group, secret):
    layout = h5py.VirtualLayout((2,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "training/steps/loss", (2,))
    group.create_virtual_dataset("loss", layout)


def gigantic(group, secret):
    group.create_dataset("loss", (1 << 40,), "f8", chunks=(4096,), compression="gzip")


def compound(group, secret):
    group["loss"] = np.zeros(2, dtype=[("a", "f8"), ("b", "f8")])


def two_dimensional(group, secret):
    group["loss"] = np.zeros((2, 2))


def unequal(group, secret):
    group["loss"] = np.zeros(3)


@pytest.mark.parametrize(
    "trap",
    [external_link, soft_link, external_values, virtual_values, gigantic, compound, two_dimensional, unequal],
)
def test_values_that_are_not_in_the_file_or_cannot_be_are_refused(open_path, make_part, trap):
    """Root, or staff, reads ANN's profile: she must not make them read their own files into the report."""
    path = open_path / "x.h5"
    write(path, make_part(""))
    write(open_path / "secret.h5", make_part(""))
    with h5py.File(path, "r+") as file:
        del file["training/steps/loss"]
        trap(file["training/steps"], open_path / "secret.h5")
    with pytest.raises(ProfileError, match=r"x\.h5 is no profile, or damaged: /training/steps"):
        read(path)


@pytest.mark.parametrize("seconds", [np.nan, -1.0, 1e300, np.inf])
def test_times_that_no_calendar_has_are_refused(open_path, make_part, seconds):
    write(open_path / "x.h5", make_part())
    with h5py.File(open_path / "x.h5", "r+") as file:
        file.attrs["start_seconds"] = seconds
    with pytest.raises(ProfileError, match=r"x\.h5 is no profile, or damaged: it is said to be from"):
        read_header(open_path / "x.h5")


def test_a_part_that_unpacks_into_more_than_there_is_costs_only_itself(site, make_part, monkeypatch):
    """256 MB of zeros, in a file of 300 kB, for a collector that may take 64 MB."""
    site.make_directory()
    write(site.parts / "n1-a.h5", make_part())
    write(site.parts / "n2-a.h5", make_part("n2"))
    with h5py.File(site.parts / "n2-a.h5", "r+") as file:
        device = file["nodes/n2/devices/gpu-a"]
        for name in list(device):
            del device[name]
        device.create_dataset("time_seconds", data=np.zeros(1 << 25), chunks=(1 << 17,), compression="gzip")
    assert (site.parts / "n2-a.h5").stat().st_size < 1 << 20
    for path in site.parts.iterdir():
        os.chown(path, ANN, ANN)
    monkeypatch.setattr(as_user, "MOST_MEMORY_BYTES", 64 << 20)
    (path,) = collect_job(site.job)
    assert [node.node for node in read(path).nodes] == ["n1"]
    assert "n2-a.h5 is no profile, or damaged: Unable to allocate" in read(path).events[0].text


@pytest.fixture
def set_umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def staff():
    """A group of this machine that neither ANN nor EVE is in by default."""
    return next(group for group in grp.getgrall() if group.gr_gid not in (0, ANN, BOB, EVE))


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_a_profile_can_be_read_by_its_user_alone(site, set_umask, umask):
    set_umask(umask)
    assert collect_journal(site.journal(), site.settings)
    (whole,) = site.job.glob("*.h5")
    (part,) = site.parts.iterdir()
    for path in (whole, part):
        assert works_as(ANN, partial(read, path))
        assert not works_as(EVE, path.read_bytes)
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (ANN, 0o600)
    assert not works_as(EVE, lambda: list(site.job.iterdir()))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_staff_may_read_every_profile_and_write_none(site, staff, set_umask, umask):
    set_umask(umask)
    assert collect_journal(site.journal(), replace(site.settings, staff_group=staff.gr_name))
    (whole,) = site.job.glob("*.h5")
    (part,) = site.parts.iterdir()
    for path in (whole, part):
        assert works_as(EVE, partial(read, path), groups=[staff.gr_gid])
        assert not works_as(EVE, partial(path.open, "r+"), groups=[staff.gr_gid])
        assert not works_as(EVE, path.unlink, groups=[staff.gr_gid])
        assert not works_as(EVE, path.read_bytes)
    # What the user's own processes make there can be read too: a report merges again.
    whole.unlink()
    assert works_as(ANN, lambda: collect_job(site.job))
    assert works_as(EVE, partial(read, whole), groups=[staff.gr_gid])


def test_a_staff_group_that_is_none_leaves_a_profile_to_its_user(site):
    assert collect_journal(site.journal(), replace(site.settings, staff_group="no-such-group"))
    assert stat.S_IMODE(site.job.stat().st_mode) == 0o700


def test_journals_in_another_users_directory_are_not_believed(site):
    """A forged journal could have root write as anyone: this one is, ANN says, of BOB's job."""
    forged = site.journal(uid=BOB, gid=BOB)
    os.chown(forged.parent, ANN, ANN)
    with pytest.raises(PermissionError, match=r"journals could be written to by another user \(owner 1000"):
        recover(site.settings)
    assert not (site.root / "profiles").exists()


def test_a_journal_of_another_user_is_not_believed_wherever_it_is(site):
    forged = site.journal(uid=BOB, gid=BOB)
    os.chown(forged, ANN, ANN)
    with pytest.raises(CollectError, match="it belongs to user 1000, who may have made it up"):
        collect_journal(forged, site.settings)
    assert not (site.root / "profiles").exists()


@pytest.mark.parametrize("length", [0, 1, (1 << 20) + 1, 0xFFFFFFFF])
def test_a_record_that_lies_about_its_length_ends_the_journal_and_takes_no_memory(site, length):
    path = site.journal()
    with path.open("ab") as file:
        file.write(struct.pack("<IIB", length, 0, journal.SAMPLE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert collect_journal(path, site.settings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # of 4 GB said; in kB
    (whole,) = site.job.glob("*.h5")
    (node,) = read(whole).nodes
    assert node.devices[0].samples["power_watts"].tolist() == [300.0]
    assert [event.kind for event in node.events] == ["journal"]


@pytest.mark.parametrize("poison", ["ann's", "open to all", "a link", "a fifo", "binary", "python"])
def test_a_configuration_that_another_could_have_written_is_not_used(site, poison):
    path = site.root / "node.toml"
    path.write_text(f'python = "{site.root}/evil"\nprofile_root = "{site.bobs}"\n')
    if poison == "ann's":
        os.chown(path, ANN, ANN)
    elif poison == "open to all":
        path.chmod(0o666)
    elif poison == "a link":
        path.rename(site.root / "real")
        path.symlink_to(site.root / "real")
    elif poison == "a fifo":
        path.unlink()
        os.mkfifo(path)
    elif poison == "binary":
        path.write_bytes(os.urandom(1000))
    else:
        path.write_text("import os; os.system('id')\n")
    found, doubt = load_or_default(path)
    assert found == NodeSettings()
    assert doubt.startswith("the defaults apply: ")


def test_texts_of_a_job_reach_terminal_and_page_as_text(site, tmp_path):
    """From the hook's environment and the driver, through journal, part and file, to what people see."""
    path = site.journal(user=HOSTILE, sluid=HOSTILE)
    descriptor = journal.open_existing(path)
    writer = journal.Writer(descriptor)
    record = journal.DeviceRecord(HOSTILE, "gpu", HOSTILE, 1, HOSTILE, ("utilization_ratio",), pci=HOSTILE)
    writer.device(1, replace(record, absent={"utilization_ratio": HOSTILE}))
    writer.samples([(1, time.monotonic(), (float("nan"),))])
    writer.event(HOSTILE, HOSTILE)
    os.close(descriptor)
    assert collect_journal(path, site.settings)
    (whole,) = site.job.glob("*.h5")
    assert read(whole).user == HOSTILE  # kept as it was said
    page = tmp_path / "page.html"
    result = CliRunner().invoke(trimtab, ["report", str(whole), "--html", str(page)])
    assert result.exit_code == 0
    plain = CliRunner().invoke(trimtab, ["report", str(whole)])
    assert plain.exit_code == 0
    for letter in "\x1b\x07\r\u202e":
        assert letter not in plain.output
    shown = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)  # the page's own, known by hash
    assert shown.count("&lt;img src=x onerror=alert(2)&gt;") >= 4
    assert "<img" not in shown
    assert not re.search("[\x1b\x07\u202e]", shown)
