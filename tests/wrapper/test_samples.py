import numpy as np
import pytest

from trimtab.balance.measuring.samples import Samples, parse_spans, samples_of

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
