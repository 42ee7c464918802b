import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from trimtab.cli import main
from trimtab_slurm import profile as profile_file

THERMAL = 0x40  # NVML: slowed down by the hardware because of its temperature


@pytest.fixture
def stored(tmp_path):
    def store(profile):
        file = tmp_path / "attempt.h5"
        profile_file.write(file, profile)
        return file

    return store


def diagnosed(*arguments):
    result = CliRunner().invoke(main, ["diagnose", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments):
    result = CliRunner().invoke(main, ["diagnose", *map(str, arguments)])
    assert result.exit_code == 2
    return result.stderr


def texts(found, kind):
    return [each["text"] for each in found["evidence"] if each["kind"] == kind]


def on_gpus(profile, hot):
    """The profile as if each device were a GPU at 1.74 GHz, the one of rank `hot` throttled to 1.10 GHz."""

    def gpu(device):
        rank = int(device.uuid.removeprefix("cpu-"))
        count = len(device.samples["time_seconds"])
        samples = {
            **device.samples,
            "sm_clock_hertz": np.full(count, 1.10e9 if rank == hot else 1.74e9),
            "temperature_celsius": np.full(count, 92.0 if rank == hot else 61.0),
            "throttle_reasons_bits": np.where(np.arange(count) % 5 < 4, THERMAL if rank == hot else 0, 0).astype(float),
        }
        return dataclasses.replace(device, kind="gpu", model="H100", samples=samples, absent={})

    nodes = [dataclasses.replace(node, devices=tuple(map(gpu, node.devices))) for node in profile.nodes]
    return dataclasses.replace(profile, nodes=tuple(nodes))


def with_probes(profile, slow, factor):
    """Three probes of each rank, those of `slow` taking `factor` times as long."""
    ranks = profile.training.ranks["rank"]
    probes = {
        "step": np.repeat([1, 10, 20], len(ranks)),
        "rank": np.tile(ranks, 3),
        "seconds": np.tile(np.where(ranks == slow, 0.01 * factor, 0.01), 3),
    }
    return dataclasses.replace(profile, training=dataclasses.replace(profile.training, probes=probes))


def test_a_slow_place_of_a_profile_is_named_with_its_ranks_and_node(stored, profiles):
    found = diagnosed(stored(profiles.make(data=4, slow=(2, 0, 1.3), head_seconds=0.0)))
    assert (found["cause"], found["secondary"], found["stages"], found["ranks"]) == ("hardware", None, [0], [4, 5])
    assert found["places"] == [{"replica": 2, "stage": 0, "ranks": [4, 5]}]
    assert found["nodes"] == ["n3"]
    assert texts(found, "node") == []
    assert found["confidence"] > 0.9
    (slow,) = found["slow_places"]
    assert slow["slower_ratio"] == pytest.approx(0.3, rel=1e-6)  # steps without any noise
    assert slow["since_step"] == 2  # the first step of an attempt warms up, and is left out
    # Microbatches of 25 + 50 ms: 8 on the slow stage, which waits while the other one has the first microbatch, but for
    # a forward of its own, and the last one, but for a backward. The mean of 8 places is 1.0375; the rest of the 1.5 s
    # stays.
    slow_pipeline = 8 * 0.075 * 1.3 + (0.075 - 0.025 * 1.3) + (0.075 - 0.05 * 1.3)
    mean_pipeline = 9 * 0.075 * 1.0375
    expected = 1.5 / (1.5 - slow_pipeline + mean_pipeline)
    assert found["slowdown_ratio"] == pytest.approx(expected, rel=1e-6)


def test_a_node_whose_places_are_all_slow_is_named(stored, profiles):
    profile = profiles.make(data=4, ranks_per_node=4, head_seconds=0.0)  # two replicas of a stage on each node
    stages = dict(profile.training.stages)
    slow = (stages["stage"] == 1) & (stages["replica"] >= 2)
    stages["backward_seconds"] = np.where(slow, 1.5, 1.0) * stages["backward_seconds"]
    found = diagnosed(stored(profiles.change(profile, training={"stages": stages})))
    assert (found["cause"], found["ranks"], found["nodes"]) == ("hardware", [12, 13, 14, 15], ["n4"])
    assert texts(found, "node") == ["all 2 places on n4 are slow: look at the node rather than at one device"]


def test_a_long_last_stage_of_one_replica_may_also_be_hardware(stored, profile):
    found = diagnosed(stored(profile))
    assert (found["cause"], found["stages"], found["ranks"], found["nodes"]) == ("intrinsic", [1], [2, 3], [])
    assert found["confidence"] <= 0.5
    assert "a probe tells them apart" in texts(found, "limit")[0]


def test_a_probe_tells_hardware_from_layers(stored, profile):
    slow = diagnosed(stored(with_probes(profile, slow=3, factor=0.85 / 0.6)))
    assert (slow["cause"], slow["ranks"], slow["nodes"]) == ("hardware", [2, 3], ["n2"])
    assert slow["slow_places"][0]["error_ratio"] is None
    assert texts(slow, "place") == [
        "stage 1 of replica 0 takes 41.7% longer than its layers alone do, by what is known of its devices"
    ]
    assert texts(slow, "probe") == ["rank 3 takes 41.7% longer than the typical rank for the probe's fixed work"]
    sound = diagnosed(stored(with_probes(profile, slow=3, factor=1.02)))
    assert (sound["cause"], sound["stages"]) == ("intrinsic", [1])
    assert sound["confidence"] > 0.9
    assert texts(sound, "probe") == texts(sound, "limit") == []


def test_probes_on_cpus_have_to_be_far_apart_to_tell(stored, profiles, profile):
    assert diagnosed(stored(with_probes(profile, slow=3, factor=1.2)))["cause"] == "intrinsic"
    ranks = dict(profile.training.ranks)
    ranks["device"] = np.array([f"GPU-{rank}" for rank in ranks["rank"]])
    on_gpus = profiles.change(with_probes(profile, slow=3, factor=1.2), training={"ranks": ranks})
    assert diagnosed(stored(on_gpus))["slow_places"][0]["slower_ratio"] == pytest.approx(0.2)


def test_of_several_probes_the_last_one_counts(stored, profile):
    probes = with_probes(profile, slow=3, factor=0.85 / 0.6).training.probes
    late = probes | {"seconds": np.where(probes["step"] < 20, 0.01, probes["seconds"])}
    training = dataclasses.replace(profile.training, probes=late)
    found = diagnosed(stored(dataclasses.replace(profile, training=training)))
    assert found["slow_places"][0]["slower_ratio"] == pytest.approx(0.85 / 0.6 - 1)


def test_a_throttled_gpu_is_evidence_with_its_clock_its_reason_and_its_node(stored, profile):
    found = diagnosed(stored(on_gpus(profile, hot=2)))
    assert (found["cause"], found["ranks"], found["nodes"]) == ("hardware", [2, 3], ["n2"])
    assert texts(found, "device") == [
        "the GPU of rank 2 (gpu 0, cpu-2 on n2) ran at 1.10 GHz where its peers' median is 1.74, was throttled in "
        "80.0% of the samples: temperature, by the hardware, was at 92 °C (peers 61)"
    ]


def test_a_replica_with_more_tokens_is_data_not_hardware(stored, profiles):
    profile = profiles.make(data=4, slow=(1, 0, 1.3), head_seconds=0.0)
    stages = dict(profile.training.stages)
    more = np.where(stages["replica"] == 1, 1.3, 1.0) * (1 + 0.01 * (stages["step"] % 7))
    for kind in ("forward_seconds", "backward_seconds"):
        stages[kind] = 0.3 * more
    stages["tokens"] = np.rint(3000 * more).astype(np.int64)
    found = diagnosed(stored(profiles.change(profile, training={"stages": stages})))
    assert (found["cause"], found["ranks"], found["slow_places"]) == ("data", [], [])


def test_people_get_a_few_lines_without_what_a_hostile_name_could_do(stored, profiles):
    profile = profiles.make(data=4, slow=(2, 0, 1.3), head_seconds=0.0)
    nodes = np.array([f"{node}\x1b[2J" if node == "n3" else node for node in profile.training.ranks["node"].tolist()])
    renamed = profiles.change(profile, training={"ranks": profile.training.ranks | {"node": nodes}})
    result = CliRunner().invoke(main, ["diagnose", str(stored(renamed))])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("Cause     hardware (confidence ")
    assert lines[1] == "Where     stage 0 of replica 2 (ranks 4, 5), on n3"
    assert "  - stage 0 of replica 2 takes 30.0% longer than the same stage of the other replicas" in result.output


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_longer_than_the_terminal(stored, profiles, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(main, ["diagnose", str(stored(profiles.make(data=4, slow=(2, 0, 1.3))))], color=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()
    assert max(map(len, lines)) == columns  # the longest is broken there
    assert all(line.startswith(("  - ", "    ")) for line in lines[lines.index("Evidence") + 1 :])


def test_a_single_rank_is_a_rank(stored, profiles):
    file = stored(profiles.make(tensor=1, data=4, slow=(2, 0, 1.3), head_seconds=0.0))
    assert "(rank 2)" in CliRunner().invoke(main, ["diagnose", str(file)]).stdout


def test_a_job_id_is_found_as_the_report_finds_it(tmp_path, profile):
    file = tmp_path / "profiles/lab/42/20260601T000000Z.h5"
    file.parent.mkdir(parents=True)
    profile_file.write(file, profile)
    found = diagnosed(42, "--profiles", tmp_path / "profiles")
    assert (found["cause"], found["source"]) == ("intrinsic", str(file))
    assert "job 43: no profile below" in refused(43, "--profiles", tmp_path / "profiles")


def test_what_cannot_be_diagnosed_is_refused(stored, tmp_path, profile, profiles):
    assert "holds no training part" in refused(stored(dataclasses.replace(profile, training=None)))
    assert "2 steps were measured: at least 3 are needed" in refused(stored(profiles.make(steps=2)))
    no_profile = tmp_path / "other.h5"
    no_profile.write_text("no HDF5")
    assert str(no_profile) in refused(no_profile)
    trace = tmp_path / "trace.parquet"
    assert f"{trace}: a trace needs its sizes: pass --meta META.yaml" in refused(trace)


def test_only_a_regular_file_is_read_as_a_trace(tmp_path):
    pytest.importorskip("pyarrow")
    meta, pipe = tmp_path / "meta.yaml", tmp_path / "pipe.parquet"
    meta.write_text("dp_size: 1\npp_size: 1\nvpp_size: 1\ntp_size: 1\nworld_size: 1\n")
    os.mkfifo(pipe)
    assert f"{tmp_path}: is no regular file" in refused(tmp_path, "--meta", meta)
    assert f"{pipe}: is no regular file" in refused(pipe, "--meta", meta)
    assert f"{tmp_path}/none.parquet: does not exist" in refused(tmp_path / "none.parquet", "--meta", meta)


@pytest.mark.parametrize("module", ["pyarrow", "yaml"])
def test_without_the_readers_of_traces_the_way_to_them_is_said(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    meta = tmp_path / "meta.yaml"
    meta.write_text("dp_size: 1\npp_size: 1\nvpp_size: 1\ntp_size: 1\nworld_size: 1\n")
    text = refused(tmp_path / "trace.parquet", "--meta", meta)
    assert f"needs {module}" in text
    assert "pip install 'trimtab[traces]'" in text


def test_a_trace_goes_through_the_command(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    rows = [
        {
            "dp_rank": replica,
            "stage": stage,
            "rank": stage * 4 + replica,
            "step": step,
            "optype": f"{kind}-compute",
            "start_ts": float(microbatch),
            "duration": random.lognormal(0, 0.02) * (2.0 if (replica, stage) == (1, 1) else 1.0),
            "seq_id": microbatch,
            "mb_id": microbatch,
            "gmc": stage,
        }
        for step in range(10)
        for replica in range(4)
        for stage in range(2)
        for microbatch in range(4)
        for kind in ("forward", "backward")
    ]
    trace, meta = tmp_path / "trace.parquet", tmp_path / "meta.yaml"
    pq.write_table(pa.Table.from_pylist(rows), trace)
    meta.write_text("dp_size: 4\npp_size: 2\nvpp_size: 1\ntp_size: 1\nworld_size: 8\n")
    found = diagnosed(trace, "--meta", meta)
    assert (found["cause"], found["ranks"], found["stages"]) == ("hardware", [5], [1])
    assert set(found) >= {"cause", "ranks", "stages", "confidence", "slowdown_ratio", "evidence"}
    assert "column duration: 1 of 640 values" in refused(_with_a_negative(pa, pq, rows, tmp_path), "--meta", meta)


def _with_a_negative(pa, pq, rows, directory: Path) -> Path:
    file = directory / "damaged.parquet"
    pq.write_table(pa.Table.from_pylist([rows[0] | {"duration": -1.0}, *rows[1:]]), file)
    return file


def test_help_of_the_command_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from trimtab.cli import main\n"
        "try: main(['diagnose', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('IMPORTED', *sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not set(output.split("IMPORTED ")[1].split()) & {"numpy", "h5py", "pyarrow", "yaml"}
