import os
from pathlib import Path

import numpy as np
import pytest

from trimtab.balance.diagnosing.diagnose import diagnose
from trimtab.diagnosis.traces import TraceError, load

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("TRIMTAB_TRACES", ROOT.parent / "shared/data/straggler-traces"))
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not here: set TRIMTAB_TRACES")
META = "dp_size: 2\npp_size: 2\nvpp_size: 1\ntp_size: 4\nworld_size: 16\n"
STEPS, REPLICAS, STAGES, MICROBATCHES = (16, 20, 24, 28), 2, 2, 3
FORWARD, BACKWARD, TRANSFER = 0.1, 0.2, 0.004


def rows(slow=None):
    """Operations as they would be recorded: forwards, backwards, and both ends of their transfers.

    A receive begins when its stage is free and waits; `slow` is (replica, stage, factor).
    """
    found = []

    def add(step, replica, stage, operation, start, seconds, number, microbatch=-1, chunk=-1):
        rank = 4 * (stage * REPLICAS + replica)
        found.append((replica, stage, rank, step, operation, start, seconds, number, chunk, microbatch, chunk))

    for step in STEPS:
        for replica in range(REPLICAS):
            factor = [slow[2] if slow and (replica, stage) == slow[:2] else 1.0 for stage in range(STAGES)]
            end = 0.05  # parameters are gathered first
            for number in range(MICROBATCHES):
                add(step, replica, 0, "forward-compute", end, FORWARD * factor[0], number, number, 0)
                end += FORWARD * factor[0]
                add(step, replica, 0, "forward-send", end, TRANSFER, number)
                add(step, replica, 1, "forward-recv", 0.0, end + TRANSFER, number)  # waiting since the step began
                add(step, replica, 1, "forward-compute", end + TRANSFER, FORWARD * factor[1], number, number, 1)
                add(step, replica, 1, "backward-compute", end + 0.2, BACKWARD * factor[1], number, number, 1)
                add(step, replica, 1, "backward-send", end + 0.6, TRANSFER, number)
                add(step, replica, 0, "backward-recv", end, 0.6 + TRANSFER, number)
                end += 0.7
                add(step, replica, 0, "backward-compute", end, BACKWARD * factor[0], number, number, 0)
                end += BACKWARD * factor[0]
            for stage in range(STAGES):
                add(step, replica, stage, "params-all-gather", 0.0, 0.05, 0)
                add(step, replica, stage, "optimizer", 4.0, 0.3, 0)
    return found


COLUMNS = {
    "dp_rank": pa.int8(),
    "stage": pa.int8(),
    "rank": pa.int16(),
    "step": pa.int64(),
    "optype": pa.string(),
    "start_ts": pa.float32(),
    "duration": pa.float32(),
    "seq_id": pa.int32(),
    "mc": pa.int8(),
    "mb_id": pa.int8(),
    "gmc": pa.int16(),
}


def table(slow=None):
    columns = zip(COLUMNS.items(), zip(*rows(slow), strict=True), strict=True)
    return pa.table({name: pa.array(column, kind) for (name, kind), column in columns})


def written(tmp_path, contents, meta=META):
    trace, sizes = tmp_path / "trace.parquet", tmp_path / "meta.yaml"
    if isinstance(contents, bytes):
        trace.write_bytes(contents)
    else:
        pq.write_table(contents, trace)
    sizes.write_text(meta)
    return trace, sizes


def replaced(contents, name, values, kind=None):
    index = contents.column_names.index(name)
    return contents.set_column(index, name, pa.array(values, kind or contents.schema.field(name).type))


def refused(tmp_path, contents, meta=META):
    with pytest.raises(TraceError) as refusal:
        load(*written(tmp_path, contents, meta))
    return str(refusal.value)


def test_durations_transfers_and_ranks_are_as_recorded(tmp_path):
    trace = load(*written(tmp_path, table(slow=(1, 0, 2.5))))
    durations = trace.durations
    assert (durations.steps, durations.stages, durations.passes) == (STEPS, STAGES, (MICROBATCHES,) * 2)
    expected = np.full((len(STEPS), REPLICAS, STAGES, MICROBATCHES), FORWARD)
    expected[:, 1, 0] *= 2.5
    np.testing.assert_allclose(durations.forward_seconds, expected, rtol=1e-6)  # the file holds 32 bits
    np.testing.assert_allclose(durations.backward_seconds, 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(durations.transfer_seconds[:, :, 0], TRANSFER, atol=1e-6)  # waiting is taken out
    assert np.isnan(durations.transfer_seconds[:, :, 1]).all()
    # From 0.05 s on, replica 1 computes and waits for 3 x (0.25 + 0.7 + 0.5) s; steps end at 4.3 s or later than that.
    assert durations.overhead_seconds == pytest.approx(0.05, abs=1e-5)
    assert trace.ranks == {(0, 0): (0, 1, 2, 3), (1, 0): (4, 5, 6, 7), (0, 1): (8, 9, 10, 11), (1, 1): (12, 13, 14, 15)}
    assert trace.absent == ()


def test_a_slow_worker_is_named(tmp_path):
    found = diagnose(load(*written(tmp_path, table(slow=(1, 0, 2.5)))).durations)
    assert (found.cause, found.places) == ("hardware", ((1, 0),))
    assert found.slow_places[0].slower_ratio == pytest.approx(1.5, rel=1e-5)


def test_the_order_of_rows_does_not_matter(tmp_path):
    whole = table(slow=(1, 0, 2.5))
    mixed = whole.take(pa.array(np.random.default_rng(0).permutation(whole.num_rows)))
    first, second = (load(*written(tmp_path, each)).durations for each in (whole, mixed))
    for name in ("forward_seconds", "backward_seconds", "transfer_seconds"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_places_and_operations_may_be_missing(tmp_path):
    whole = table(slow=(1, 0, 2.5))
    place = (whole["dp_rank"].to_numpy() == 0) & (whole["stage"].to_numpy() == 1)
    trace = load(*written(tmp_path, whole.filter(pa.array(~place))))
    assert trace.absent == ((0, 1),)
    assert np.isnan(trace.durations.forward_seconds[:, 0, 1]).all()
    computed = np.isin(whole["optype"].to_numpy(zero_copy_only=False), ("forward-compute", "backward-compute"))
    bare = load(*written(tmp_path, whole.filter(pa.array(computed)))).durations
    assert bare.transfer_seconds is None
    assert bare.overhead_seconds == 0


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "mc"])
def test_a_missing_column_is_named(tmp_path, name):
    text = refused(tmp_path, table().drop_columns([name]))
    assert text.startswith(f"{tmp_path / 'trace.parquet'}: has no column {name}")


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "mc"])
def test_a_column_of_another_type_is_named(tmp_path, name):
    count = table().num_rows
    kind, values = (pa.int64(), range(count)) if name == "optype" else (pa.string(), ["x"] * count)
    assert f"column {name} holds {kind}" in refused(tmp_path, replaced(table(), name, values, kind))


@pytest.mark.parametrize(
    ("name", "row", "value", "reason"),
    [
        ("duration", 0, float("nan"), "column duration: 1 of 224 values are not at least 0; the first is nan in row 0"),
        ("duration", 5, -0.5, "column duration: 1 of 224 values are not at least 0; the first is -0.5 in row 5"),
        ("duration", 0, 0.0, "column duration: 1 of 48 values are not above 0 for forward-compute; the first is 0.0"),
        ("duration", 0, float("inf"), "column duration: 1 of 48 values are not above 0 for forward-compute"),
        ("duration", 1, None, "column duration: 1 values are missing"),
        ("start_ts", 3, float("inf"), "column start_ts: 1 of 224 values are not a number"),
        ("dp_rank", 4, 2, "column dp_rank: 1 of 224 values are not 0 to 1, as the sizes say; the first is 2 in row 4"),
        ("stage", 4, -1, "column stage: 1 of 224 values are not 0 to 1"),
        ("gmc", 0, 1, "column gmc: 1 of 48 values are not a chunk of their stage (0 to 1) for forward-compute"),
        ("mb_id", 0, -1, "column mb_id: 1 of 48 values are not at least 0 for forward-compute"),
        ("mb_id", 0, 1, "column mb_id: a forward-compute of a microbatch is there twice"),
        ("seq_id", 1, -1, "of 24 values are not at least 0 for forward-send and -recv; the first is -1 in row 1"),
        ("seq_id", 1, 2**31 - 1, "column seq_id: 2147483648 transfers in each of 4 steps are more than can be there"),
    ],
)
def test_a_damaged_value_is_named_with_its_column_and_row(tmp_path, name, row, value, reason):
    values = table()[name].to_pylist()
    values[row] = value
    text = refused(tmp_path, replaced(table(), name, values))
    assert text.startswith(f"{tmp_path / 'trace.parquet'}: ")
    assert reason in text


def test_a_microbatch_number_that_cannot_be_is_refused(tmp_path):
    values = table()["mb_id"].to_pylist()
    values[0] = 2**31 - 1
    assert "microbatches in 4 steps are more than can be there" in refused(
        tmp_path, replaced(table(), "mb_id", values, pa.int32())
    )


def test_what_is_no_trace_is_refused(tmp_path):
    assert "cannot be read as Parquet" in refused(tmp_path, b"PAR1 and no more")
    assert "has no rows" in refused(tmp_path, table().slice(0, 0))
    others = table().filter(pa.array(table()["optype"].to_numpy(zero_copy_only=False) == "optimizer"))
    assert "column optype: no forward-compute in it" in refused(tmp_path, others)
    two_steps = table().filter(pa.array(table()["step"].to_numpy() <= 20))
    assert "2 steps: at least 3" in refused(tmp_path, two_steps)
    last = table().filter(pa.array(table()["stage"].to_numpy() == 1))
    assert "no forward duration of chunk 0 on any replica" in refused(tmp_path, last)
    with pytest.raises(TraceError, match=r"nowhere.parquet: does not exist"):
        load(tmp_path / "nowhere.parquet", written(tmp_path, table())[1])


@pytest.mark.parametrize("key", ["dp_size", "pp_size", "vpp_size", "tp_size", "world_size"])
def test_a_missing_size_is_named(tmp_path, key):
    lines = [line for line in META.splitlines() if not line.startswith(key)]
    text = refused(tmp_path, table(), "\n".join(lines))
    assert text.startswith(f"{tmp_path / 'meta.yaml'}: has no {key}")


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ("", "is no table of sizes"),
        ("- 1", "is no table of sizes"),
        ("dp_size: [", "cannot be read as YAML"),
        (META.replace("pp_size: 2", "pp_size: 0", 1).replace("vpp_size: 0", "vpp_size: 1"), "pp_size must be a whole"),
        (META.replace("tp_size: 4", "tp_size: four"), "tp_size must be a whole number above 0, not 'four'"),
        (META.replace("world_size: 16", "world_size: 15"), "world_size 15 is no multiple of dp_size 2 x pp_size 2"),
        (META.replace("world_size: 16", "world_size: true"), "world_size must be a whole number above 0, not True"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, meta, reason):
    text = refused(tmp_path, table(), meta)
    assert text.startswith(f"{tmp_path / 'meta.yaml'}: ")
    assert reason in text


@needs_traces
@pytest.mark.parametrize(
    ("name", "cause", "secondary", "places", "ranks", "actual_over_ideal"),
    [
        ("AR", "hardware", None, ((0, 0),), (0, 1, 2, 3), 46.33637 / 23.48470),
        ("SE", "data", "intrinsic", (), None, 9.06656 / 5.89748),
        ("ST", "intrinsic", None, ((0, 3), (1, 3)), (6, 7), 2.17270 / 1.84330),
    ],
)
def test_production_jobs_get_their_authors_causes(name, cause, secondary, places, ranks, actual_over_ideal):
    trace = load(TRACES / f"trace-{name}.parquet", TRACES / f"meta-{name}.yaml")
    found = diagnose(trace.durations)
    assert (found.cause, found.secondary, found.places) == (cause, secondary, places)
    assert found.confidence > 0.8
    # Their simulation runs every recorded operation, ours the computations: within 2.1 %.
    assert found.slowdown_ratio == pytest.approx(actual_over_ideal, rel=0.03)
    if ranks:
        assert tuple(rank for place in places for rank in trace.ranks[place]) == ranks
