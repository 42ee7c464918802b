"""slurm.conf as admins write it, and what to do there for the hooks to run."""

from pathlib import Path

import pytest

from trimtab_slurm.admin import registration, slurmconf


@pytest.fixture
def conf(tmp_path):
    """A function that reads a slurm.conf of this text."""

    def make(text):
        (tmp_path / "slurm.conf").write_text(text.replace("DIR", str(tmp_path)))
        return slurmconf.read(tmp_path / "slurm.conf")

    return make


@pytest.fixture
def hook(tmp_path):
    """An installed hook."""
    path = tmp_path / "trimtab/prolog.d/trimtab"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Prolog=/a\n", ("/a",)),
        ("PROLOG = /a # the site's\n", ("/a",)),
        ('ClusterName=x prolog="/a/*"\n', ("/a/*",)),
        ("#Prolog=/a\nPrologFlags=Alloc\nTaskProlog=/t\nPrologSlurmctld=/c\n", ()),
        ("Prolog=\\\n/a\n", ("/a",)),
        ("Prolog=/a\nProlog=/b\n", ("/a", "/b")),
        ("Include DIR/more.conf\nProlog=/b\n", ("/more", "/b")),
        ("include more.conf\n", ("/more",)),
        ("ClusterName=lab\nInclude %c.conf\n", ("/lab",)),
        ("Include slurm.conf\nProlog=/a\n", ("/a",)),
    ],
)
def test_keys_are_found_as_slurm_finds_them(conf, tmp_path, text, values):
    (tmp_path / "more.conf").write_text("Prolog=/more\nInclude more.conf\n")
    (tmp_path / "lab.conf").write_text("Prolog=/lab")
    assert conf(text).all("Prolog") == values


def test_what_cannot_be_read_is_said(conf, tmp_path):
    found = conf("Include nowhere.conf\nProlog=/a\n")
    assert found.missing == (f"{tmp_path}/nowhere.conf: No such file or directory",)
    assert found.last("Prolog") == "/a"
    with pytest.raises(slurmconf.SlurmConfError, match="cannot be read: Is a directory; name another"):
        slurmconf.read(tmp_path)


def test_the_file_is_the_one_given_or_that_of_the_environment(tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("")
    other.write_text("")
    monkeypatch.setenv("SLURM_CONF", str(other))
    monkeypatch.chdir(tmp_path)
    assert slurmconf.find(None) == other
    assert slurmconf.find(one) == one
    assert slurmconf.find(Path("one")) == one  # what is told to be done is done elsewhere
    assert slurmconf.find(Path("/dev/null")) is None
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setattr(slurmconf, "PLACES", (str(tmp_path / "nowhere"), str(other)))
    assert slurmconf.find(None) == other
    monkeypatch.setattr(slurmconf, "PLACES", (str(tmp_path / "nowhere"),))
    assert slurmconf.find(None) is None


def test_a_file_that_was_named_and_is_missing_is_refused(tmp_path, monkeypatch):
    missing = tmp_path / "slurm.conf"
    with pytest.raises(slurmconf.SlurmConfError, match=f"^--slurm-conf {missing}: No such file or directory; give"):
        slurmconf.find(missing)
    monkeypatch.setenv("SLURM_CONF", str(missing))
    with pytest.raises(slurmconf.SlurmConfError, match=f"^SLURM_CONF {missing}: No such file .* /dev/null for none"):
        slurmconf.find(None)


def test_without_a_prolog_the_hook_gets_a_line_of_its_own(conf, hook):
    for found in (None, conf("ClusterName=lab\n")):
        assert registration.steps(found, "Prolog", hook)[-1] == f"Prolog={hook}"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*", "trimtab"), ("*.sh", "trimtab.sh"), ("[0-9]*", "90-trimtab"), ("[0-9]*.sh", "90-trimtab.sh")],
)
def test_in_a_directory_of_scripts_the_hook_gets_a_link_that_slurmd_runs(conf, hook, tmp_path, pattern, name):
    (tmp_path / "prolog.d").mkdir()
    found = conf(f"Prolog=DIR/prolog.d/{pattern}\n")
    assert registration.steps(found, "Prolog", hook)[-1] == f"ln -s {hook} {tmp_path}/prolog.d/{name}"
    (tmp_path / "prolog.d" / name).symlink_to(hook)
    assert registration.runs(found, "Prolog", hook) == f"Prolog={tmp_path}/prolog.d/{pattern}"
    assert registration.steps(found, "Prolog", hook) == [
        f"# nothing to do: Prolog={tmp_path}/prolog.d/{pattern} runs {hook}"
    ]
    assert list(registration.draining(found, "Prolog")) == []


def test_a_pattern_that_fits_no_name_of_ours_leaves_the_name_to_the_admin(conf, hook):
    assert registration.steps(conf("Prolog=/p/site-?\n"), "Prolog", hook) == [
        "# on every node, a link by a name that /p/site-? matches:",
        f"ln -s {hook} NAME",
    ]


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("HOOK || :", True),
        ("[ -x HOOK ] && HOOK", True),
        ('"HOOK"; exit 0', True),
        ("# HOOK", False),
        ("HOOK.old", False),
        ("/other/HOOK", False),
        ("true", False),
    ],
)
def test_an_admins_script_runs_the_hook_where_it_names_it(conf, hook, tmp_path, line, run):
    (tmp_path / "site").write_text(f"#!/bin/sh\n{line.replace('HOOK', str(hook))}\n")
    (tmp_path / "site").chmod(0o755)
    found = conf("Prolog=site\n")  # beside slurm.conf, as in configless clusters
    by = f"Prolog=site, by {tmp_path}/site" if run else ""
    assert registration.runs(found, "Prolog", hook) == by
    if not run:
        assert registration.steps(found, "Prolog", hook) == [
            f"# in {tmp_path}/site, before it exits, so that it goes on whatever happens:",
            f"{hook} || :",
        ]


def test_a_copy_is_the_hook_and_another_script_is_not(conf, hook, tmp_path):
    (tmp_path / "copy").write_text(hook.read_text())
    (tmp_path / "other").write_text("#!/bin/sh\nexit 1\n")
    assert registration.runs(conf("Prolog=DIR/copy"), "Prolog", hook) == f"Prolog={tmp_path}/copy"
    assert registration.runs(conf("Prolog=DIR/other"), "Prolog", hook) == ""
    assert registration.runs(conf("Epilog=DIR/copy"), "Prolog", hook) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("nowhere", "Prolog={dir}/nowhere: there is no such file"),
        ("empty.d/*", "Prolog={dir}/empty.d/*: there is no such file"),
        ("p.d/*", "Prolog={dir}/p.d/*: {dir}/p.d/README cannot be executed"),
        ("l.d/*", "Prolog={dir}/l.d/*: {dir}/l.d/link is a link that leads nowhere"),
    ],
)
def test_what_slurmd_would_drain_a_node_for_is_said(conf, tmp_path, value, text):
    for name in ("empty.d", "p.d", "l.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "p.d/README").write_text("")
    (tmp_path / "p.d/.hidden").write_text("")  # which no * matches
    (tmp_path / "l.d/link").symlink_to("nowhere")
    found = [each for each, _ in registration.draining(conf(f"Prolog=DIR/{value}"), "Prolog")]
    assert found == [text.format(dir=tmp_path)]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "PrologFlags=Alloc"),
        ("PrologFlags=Alloc", ""),
        ("PrologFlags=contain", ""),
        ("PrologFlags=Serial,X11", ""),
        ("PrologFlags=Serial", "PrologFlags=Serial,Alloc"),
    ],
)
def test_flags_that_are_there_are_kept(conf, flags, line):
    assert registration.flags_line(conf(flags)) == line


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("PrologFlags=Alloc,RunInJob", "PrologFlags has RunInJob: the sampler is in the job's own cgroup"),
        ("PrologEpilogTimeout=1", "PrologEpilogTimeout=1: slurmd kills a hook, and drains the node"),
        ("Prolog=/a\nProlog=/b", "Prolog is set 2 times: Slurm 22.05 takes the last alone (/b)"),
        ("Include nowhere", "what is included could not be read, and may say more: "),
    ],
)
def test_what_is_in_the_hooks_way_is_warned_of(conf, text, warning):
    ((found, _),) = registration.warnings(conf(text))
    assert found.startswith(warning)
    assert any(warning in line for line in registration.advice(conf(text), {}))


def test_a_timeout_that_the_hooks_keep_is_nobodys_business(conf):
    assert list(registration.warnings(conf("PrologEpilogTimeout=2\nEpilogTimeout=65534\nPrologTimeout=0\n"))) == []
