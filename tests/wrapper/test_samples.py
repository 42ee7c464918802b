import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.balance.samples import Samples, layout_of_ranks, parse_spans, samples_of
from trimtab.protocol import Layout

TABLE = {
    "step": [1, 1, 2],
    "replica": [0, 0, 0],
    "stage": [0, 1, 0],
    "forward_seconds": [1.0, 2.0, 3.0],
    "backward_seconds": [2.0, 4.0, 6.0],
    "tokens": [64, 64, 64],
    "peak_memory_bytes": [1, 1, 1],
}


def test_samples_are_the_columns_of_the_table_of_stages():
    samples = samples_of(TABLE | {"microbatches": [4, 4, 4], "squared_lengths": [512, 512, 256]})
    assert samples.stage.tolist() == [0, 1, 0]
    assert samples.backward_seconds.tolist() == [2.0, 4.0, 6.0]
    assert samples.squared_lengths.tolist() == [512.0, 512.0, 256.0]
    assert samples.layout.tolist() == [0, 0, 0]


def test_columns_that_older_profiles_lack_are_not_known():
    samples = samples_of(TABLE)
    assert np.isnan(samples.microbatches).all()
    assert np.isnan(samples.squared_lengths).all()


def test_a_layout_begins_with_its_first_step():
    table = TABLE | {"step": [6, 7, 12]}
    assert samples_of(table, [7, 12]).layout.tolist() == [0, 1, 2]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="the column tokens does not hold 3 values"):
        samples_of(TABLE | {"tokens": [64]})


def test_rows_are_selected():
    assert samples_of(TABLE).select(np.array([False, True, True])).step.tolist() == [1, 2]
    assert isinstance(samples_of(TABLE).select(np.zeros(3, dtype=bool)), Samples)


def test_spans_are_layers():
    assert parse_spans("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_spans("") == ()


@pytest.mark.parametrize("text", ["0-", "a", "1;2", "0-123456", "١", "0,,1", " 1"])
def test_what_are_no_spans_is_refused(text):
    with pytest.raises(ValueError, match="are not written as"):
        parse_spans(text)


def test_the_layout_of_ranks_counts_tensor_ranks_and_replicas_once():
    ranks, layers = [0, 0, 1, 1, 0, 0, 1, 1], ["0-2", "0-2", "3-7", "3-7"] * 2
    assert layout_of_ranks(ranks, layers) == Layout((3, 5), 2)


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_any_layout_is_found_again_from_its_ranks(stages, virtual, data):
    chunks = stages * virtual
    counts = [data.draw(st.integers(1, 3)) for _ in range(chunks)]
    if virtual == 1 and chunks > 2:  # the embedding, or the head, may have a stage of its own
        counts[0], counts[-1] = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    if stages == 1:
        counts = [sum(counts)]  # the chunks of a single stage are one
    layout = Layout(tuple(counts), stages)
    texts = [",".join(map(str, layout.stage_layers(stage))) for stage in range(stages)]
    assert layout_of_ranks(range(stages), texts) == layout


@pytest.mark.parametrize("layers", [["0-1", "3"], ["0-1", "1-2"], ["1-2", "3"]])
def test_layers_that_are_no_model_are_refused(layers):
    with pytest.raises(ValueError, match="not those of one model"):
        layout_of_ranks([0, 1], layers)
