import os

import pytest

from trimtab_slurm.settings import NodeSettings, SettingsError, load, load_or_default, render


def test_what_is_rendered_is_loaded_again(tmp_path):
    wanted = NodeSettings(
        '/j/a "b"\\c', "/p/ö", 0.5, "/opt/venv/bin/python", ("a", 'b"'), 2, "no", "staff", "/lib/nvml.so.1", "hang:0@5"
    )
    assert all(value != vars(NodeSettings())[key] for key, value in vars(wanted).items())
    (tmp_path / "node.toml").write_text(render(wanted), encoding="utf-8")
    assert load(tmp_path / "node.toml") == wanted


def test_what_a_file_leaves_out_is_the_default(tmp_path):
    (tmp_path / "node.toml").write_text("sampler_period_seconds = 2")
    assert load(tmp_path / "node.toml") == NodeSettings(sampler_period_seconds=2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile_rot = '/p'", "unknown key profile_rot; did you mean profile_root?"),
        ("x = 1", "unknown key x; choose from journal_directory, profile_root, sampler_period_seconds"),
        ("profile_root = 3", "profile_root = 3: must be a text in quotes"),
        ("sampler_period_seconds = '1'", "sampler_period_seconds = '1': must be a number"),
        ("sampler_period_seconds = true", "sampler_period_seconds = True: must be a number"),
        ("sampler_period_seconds = 0", "sampler_period_seconds = 0.0: must be between 0.01 and 3600"),
        ("sampler_period_seconds = nan", "sampler_period_seconds = nan: must be between"),
        ("profile_root = 'here'", 'profile_root = "here": must be an absolute path'),
        ("python = 'python3'", 'python = "python3": must be an absolute path, or empty'),
        ("nvml_library = 'libnvidia-ml.so.1'", "must be an absolute path, or empty"),
        ("partitions = 'gpu'", "partitions = 'gpu': must be a list of texts in quotes"),
        ("partitions = ['gpu', 3]", "partitions = ['gpu', 3]: must be a list of texts in quotes"),
        ("minimum_gpus = 1.5", "minimum_gpus = 1.5: must be a whole number"),
        ("opt_out = 'no profile'", 'opt_out = "no profile": must be one word'),
        ("minimum_gpus = -1", "minimum_gpus = -1: must be 0 or more"),
        ("= 3", "is not TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_missing_file_is_refused_where_settings_are_asked_for(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load(tmp_path / "node.toml")


def test_a_privileged_process_believes_its_own_file(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("sampler_period_seconds = 2")
    path.chmod(0o644)
    assert load_or_default(path) == (NodeSettings(sampler_period_seconds=2.0), "")


@pytest.mark.parametrize("poison", ["group", "world", "owner", "link", "fifo", "missing", "faulty"])
def test_a_privileged_process_takes_the_defaults_for_a_file_that_others_could_have_written(tmp_path, poison):
    path = tmp_path / "node.toml"
    path.write_text("profile_root = '/evil'")
    path.chmod({"group": 0o664, "world": 0o646}.get(poison, 0o644))
    if poison == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 1000, 1000)
    elif poison == "link":
        path = tmp_path / "link.toml"
        path.symlink_to("node.toml")
    elif poison == "fifo":
        path = tmp_path / "fifo.toml"
        os.mkfifo(path)
    elif poison == "missing":
        path.unlink()
    elif poison == "faulty":
        path.write_text("profile_root = 1")
    settings, doubt = load_or_default(path)
    assert settings == NodeSettings()
    assert doubt.startswith("the defaults apply: ")
    assert str(path) in doubt


@pytest.mark.parametrize(
    ("partition", "gpus", "comment", "reason"),
    [
        ("gpu", 2, "", ""),
        ("big", 8, "quick look", ""),
        ("gpu", None, "", ""),  # Slurm does not say how many: profiled, rather than lost
        ("cpu", 2, "", "partition cpu is not one of gpu, big"),
        ("gpu", 1, "", "GPUs that it holds here: 1, of at least 2"),
        ("gpu", 8, "mine trimtab=off", "its comment says trimtab=off"),
        ("gpu", 8, "mine,trimtab=off", "its comment says trimtab=off"),
        ("gpu", 8, "no-trimtab=off", ""),
    ],
)
def test_a_job_is_left_out_by_partition_number_of_gpus_or_its_own_word(partition, gpus, comment, reason):
    settings = NodeSettings(partitions=("gpu", "big"), minimum_gpus=2)
    assert settings.reason_to_skip(partition, gpus, comment) == reason


def test_by_default_every_job_is_profiled():
    assert NodeSettings().reason_to_skip("", 0, "") == ""
