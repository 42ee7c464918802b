import math

import pytest

from trimtab.balance.student import student_quantile


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
