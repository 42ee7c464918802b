import math

import numpy as np
import pytest

from trimtab.balance.sureness import step_correlations, student_quantile, variance_inflation


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [  # Abramowitz and Stegun, table 26.10
        (0.975, 1, 12.706),
        (0.95, 2, 2.920),
        (0.975, 3, 3.182),
        (0.95, 15, 1.753),
        (0.99, 19, 2.539),
        (0.9995, 10, 4.587),
        (0.95, 120, 1.658),
    ],
)
def test_quantiles_are_those_of_the_tables(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)  # tables have three digits


def test_half_of_the_values_are_below_zero():
    assert student_quantile(0.5, 7) == 0.0


def test_the_tail_that_many_places_ask_for_is_exact():
    # With two degrees of freedom the quantile is a closed form.
    probability = 1 - 0.05 / 10_000
    inside = 2 * probability - 1
    assert student_quantile(probability, 2) == pytest.approx(inside * math.sqrt(2 / (1 - inside**2)), rel=1e-6)


def test_the_correlation_of_a_step_with_the_next_is_found_without_bias():
    """AR(1) noise of 2,000 places and 20 steps: the mean of the estimates is off by 1 / T at the most."""
    random = np.random.default_rng(0)
    for planted in (0.0, 0.5):
        rows = [random.standard_normal(2000)]
        for _ in range(19):
            rows.append(planted * rows[-1] + np.sqrt(1 - planted**2) * random.standard_normal(2000))
        values = np.array(rows)
        assert step_correlations(values - values.mean(axis=0)).mean() == pytest.approx(planted, abs=0.05)


def test_what_never_varies_has_no_correlation():
    assert np.isnan(step_correlations(np.zeros((20, 2)))).all()


def test_noise_that_lasts_makes_a_mean_less_sure_and_never_more():
    assert variance_inflation(0.5) == 3.0
    assert variance_inflation(-0.5) == 1.0
    assert variance_inflation(0.99) == variance_inflation(0.9)
