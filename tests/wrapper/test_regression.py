import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.measuring.regression import OrderedLeastSquares, fit_robust


def line(x):
    slopes = np.column_stack([np.ones_like(x), x])
    return lambda values: (slopes @ values, slopes)


def test_a_line_is_found_among_samples_that_are_far_off():
    random, x = np.random.default_rng(0), np.linspace(0, 1, 100)
    observed = 2 + 3 * x + 0.01 * random.standard_normal(100)
    clean = fit_robust(line(x), observed, np.zeros(2), np.arange(100))
    observed[::10] += 50
    fit = fit_robust(line(x), observed, np.zeros(2), np.arange(100))
    # its error is 0.01 x sqrt(12 / 90) for the slope; a mean would be off by 5
    assert fit.values == pytest.approx([2, 3], abs=4 * 0.004)
    assert np.sqrt(np.diagonal(fit.covariance(np.eye(2)))) == pytest.approx(
        np.sqrt(np.diagonal(clean.covariance(np.eye(2)))), rel=0.3
    )


def test_errors_in_common_make_the_error_larger():
    random, x = np.random.default_rng(1), np.linspace(0, 1, 400)
    clusters = np.arange(400) % 20
    observed = random.standard_normal(20)[clusters] + 0.01 * random.standard_normal(400)
    fit = fit_robust(line(x), observed, np.zeros(2), clusters)
    mean = np.array([[1, 0.5]])
    # 20 clusters tell a mean to 1 / sqrt(20), 400 samples would to 1 / 20
    assert np.sqrt(fit.covariance(mean)[0, 0]) == pytest.approx(20**-0.5, rel=0.5)


def test_too_few_samples_tell_no_error():
    x = np.arange(4.0)
    fit = fit_robust(line(x), 1 + x, np.zeros(2), x)
    assert fit.values == pytest.approx([1, 1])
    assert np.isnan(fit.covariance(np.eye(2))).all()


def test_later_equations_only_decide_what_is_open():
    equations = OrderedLeastSquares(3, 1)
    equations.settle(np.array([[1.0, 1, 0]]), np.array([[4.0]]))
    assert [equations.is_open(unknown) for unknown in range(3)] == [True, True, True]
    equations.settle(np.array([[1.0, 0, 0], [0, 1, 0]]), np.array([[3.0], [3.0]]))  # they cannot both be 3
    assert equations.solution[:2, 0] == pytest.approx([2, 2])
    assert [equations.is_open(unknown) for unknown in range(3)] == [False, False, True]


def test_an_equation_too_uncertain_for_its_unknown_is_left_open():
    rows, targets = np.array([[1 / 0.3]]), np.array([[5 / 0.3]])  # 5, with an error of 0.3
    for tolerance, settled in ((0.2, False), (0.4, True)):
        equations = OrderedLeastSquares(1, 1)
        equations.settle(rows, targets, np.array([tolerance]))
        assert equations.is_open(0) is not settled


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.lists(st.integers(0, 4), max_size=4))
def test_each_set_is_solved_as_well_as_those_before_allow(seed, unknowns, sizes):
    random = np.random.default_rng(seed)
    equations, earlier = OrderedLeastSquares(unknowns, 1), np.zeros((0, unknowns))
    for size in sizes:
        rows, targets = random.standard_normal((size, unknowns)), random.standard_normal((size, 1))
        fitted, free = earlier @ equations.solution, equations.open
        equations.settle(rows, targets)
        assert earlier @ equations.solution == pytest.approx(fitted, abs=1e-6)
        residual = targets - rows @ equations.solution
        # least squares: what remains cannot be made smaller along what was free
        assert (rows @ free).T @ residual == pytest.approx(0, abs=1e-6)
        earlier = np.vstack([earlier, rows])
        assert equations.open.shape[1] == unknowns - np.linalg.matrix_rank(earlier)
