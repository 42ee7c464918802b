"""The probe: what it measures, and that training does not notice it."""

from statistics import median

import pytest
import torch

from trimtab.protocol import Notice, Probe, StepReport
from trimtab_megatron.probe import CPU_SIZE, product_seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_takes_some_time_and_draws_no_random_number(dtype):
    before = torch.get_rng_state()
    seconds = product_seconds(torch.device("cpu"), dtype)
    assert torch.equal(torch.get_rng_state(), before)
    # 2 n^3 operations, of which no core does more than a few 10^12 a second, and any more than 10^7.
    assert 2 * CPU_SIZE**3 / 1e13 < seconds < 2 * CPU_SIZE**3 / 1e7


@pytest.mark.mcore
def test_a_probe_is_reported_by_all_ranks_and_changes_nothing(start_ranks, train_ranks, tiny_job):
    tables = tiny_job(model={"dropout": 0.1}, parallel={"pipeline": 2}, train={"steps": 12})
    expected = train_ranks(tables, 2)
    ranks = start_ranks(tables, 2)
    ranks.order("probe")
    ended = ranks.end().succeeded()
    probes = ended.all(Probe)
    assert sorted(probe.rank for probe in probes) == [0, 1]
    assert len({probe.step for probe in probes}) == 1  # all ranks at the same step
    assert all(probe.seconds > 0 for probe in probes)
    assert ended.losses == expected.losses
    assert ended.gradient_norms == expected.gradient_norms
    assert not any("nothing is saved" in notice.text for notice in ended.all(Notice))
    print(f"the product took {median(probe.seconds for probe in probes) * 1e3:.2f} ms")


@pytest.mark.mcore
def test_a_report_counts_squared_lengths(train_ranks, tiny_job):
    ended = train_ranks(tiny_job(train={"steps": 2}), 1)
    for report in ended.all(StepReport):
        assert (report.microbatches, report.tokens, report.squared_lengths) == (4, 8 * 32, 8 * 32**2)
