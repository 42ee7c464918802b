import os
import stat

import pytest

from trimtab_slurm.directories import job_directory, make_job_directory, open_own, staff_gid

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")


def ownership(path):
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def test_a_job_directory_belongs_to_its_user_alone(tmp_path):
    made = make_job_directory(tmp_path / "profiles", "lab", 7, 1000, 1001)
    assert made == job_directory(tmp_path / "profiles", "lab", 7) == tmp_path / "profiles/lab/7"
    assert ownership(made) == ownership(made / "parts") == (1000, 1001, 0o700)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made.parent.parent)] == [0o755, 0o755]


def test_no_umask_keeps_its_user_from_it(tmp_path):
    before = os.umask(0o077)
    try:
        made = make_job_directory(tmp_path / "profiles", "lab", 7, 1000, 1001)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made.parent.parent)] == [0o755, 0o755]


def test_staff_may_read_what_is_made_in_it(tmp_path):
    made = make_job_directory(tmp_path, "lab", 7, 1000, 1001, staff=2000)
    assert ownership(made) == ownership(made / "parts") == (1000, 2000, 0o2750)


def test_a_staff_group_that_is_none_is_said():
    assert staff_gid("root") == (0, "")
    assert staff_gid("") == (None, "")
    staff, doubt = staff_gid("no-such-group")
    assert staff is None
    assert doubt.startswith("staff_group 'no-such-group' is no group on this node")


def test_a_directory_made_by_another_node_meanwhile_is_kept(tmp_path, monkeypatch):
    """Whose file system, as NFS does, refuses to put a directory over one that is not empty."""
    rename, others = os.rename, tmp_path / "lab/7"

    def overtaken(source, target, **options):
        others.mkdir()
        (others / "kept").touch()
        os.chown(others, 1000, 1001)
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", overtaken)
    assert make_job_directory(tmp_path, "lab", 7, 1000, 1001) == others
    assert [path.name for path in others.iterdir()] == ["kept"]
    assert [path.name for path in others.parent.iterdir()] == ["7"]


def test_making_it_again_leaves_it_as_it_is(tmp_path):
    made = make_job_directory(tmp_path, "lab", 7, 1000, 1001)
    (made / "kept").touch()
    make_job_directory(tmp_path, "lab", 7, 1000, 1001)
    assert [path.name for path in made.parent.iterdir()] == ["7"]
    assert (made / "kept").exists()


def test_an_id_used_again_by_another_user_gets_a_new_directory_and_the_old_one_is_kept(tmp_path):
    made = make_job_directory(tmp_path, "lab", 7, 1000, 1001)
    (made / "secret").touch()
    make_job_directory(tmp_path, "lab", 7, 2000, 2000)
    assert made.stat().st_uid == 2000
    assert [path.name for path in made.iterdir()] == ["parts"]
    (old,) = (path for path in made.parent.iterdir() if path.name != "7")
    assert old.name.startswith("7.before-")
    assert (old.stat().st_uid, (old / "secret").exists()) == (1000, True)


@pytest.mark.parametrize("which", ["root", "cluster", "job"])
def test_a_symlink_leads_nowhere(tmp_path, which):
    target = tmp_path / "elsewhere"
    target.mkdir()
    root = tmp_path / "profiles"
    place = {"root": root, "cluster": root / "lab", "job": root / "lab" / "7"}[which]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    if which == "job":
        make_job_directory(root, "lab", 7, 1000, 1001)  # it is root's link, and so of someone else than the user
        assert not place.is_symlink()
    else:
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            make_job_directory(root, "lab", 7, 1000, 1001)
    assert list(target.iterdir()) == []
    assert target.stat().st_uid == 0


@pytest.mark.parametrize(("owner", "mode"), [(1000, 0o755), (0, 0o777), (0, 0o775)])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, owner, mode):
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(mode)
    os.chown(place, owner, 0)
    with pytest.raises(PermissionError, match="could be written to by another user"):
        open_own(place, 0o755)
