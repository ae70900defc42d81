"""The G-test and its p-values."""

import math
import random
from collections import Counter

import pytest

from tests.gpu.statistics import chi_square_tail, g_test


@pytest.mark.parametrize(
    ("value", "degrees", "expected"),
    [
        # Percentage points of the chi-square distribution as tables give them.
        (3.841458820694124, 1, 0.05),
        (5.991464547107979, 2, 0.05),
        (18.30703805327515, 10, 0.05),
        (10.82756617, 1, 0.001),
        (149.4492529, 100, 0.001),
        (77.92946516, 100, 0.95),
        (1040.0, 1000, 0.18451),
    ],
)
def test_tail_agrees_with_tables(value, degrees, expected):
    """Both ways of computing it, on either side of where they meet."""
    assert math.isclose(expected, chi_square_tail(value, degrees), rel_tol=2e-3)


def test_two_degrees_of_freedom_are_an_exponential():
    """A closed form for every value."""
    for value in (0.01, 0.5, 1.0, 3.0, 3.9, 4.1, 20.0, 200.0):
        assert math.isclose(math.exp(-value / 2), chi_square_tail(value, 2), rel_tol=1e-10)


def test_the_tail_of_nothing_is_everything():
    """G is 0 where the samples are equal; degrees of freedom below one have no distribution."""
    assert 1.0 == chi_square_tail(0.0, 5)
    with pytest.raises(ValueError, match="degrees"):
        chi_square_tail(1.0, 0)


def test_g_of_a_two_by_two_table():
    """Worked by hand: 2 * sum of observed * ln(observed / expected)."""
    test = g_test({"a": 60, "b": 40}, {"a": 40, "b": 60})
    by_hand = 2 * (2 * 60 * math.log(60 / 50) + 2 * 40 * math.log(40 / 50))
    assert math.isclose(by_hand, test.g)
    assert (1, 2) == (test.degrees, test.cells)


def test_samples_of_one_distribution_pass_and_a_shifted_one_does_not():
    """It must be able to fail: 3000 samples show a token that is half as likely as it should be."""
    dice = random.Random(1)
    weights = [8, 7, 6, 5, 4, 3, 2, 1]
    first = Counter(dice.choices(range(8), weights, k=3000))
    second = Counter(dice.choices(range(8), weights, k=3000))
    shifted = Counter(dice.choices(range(8), [4, *weights[1:]], k=3000))
    assert g_test(first, second).p_value > 0.001
    assert g_test(first, shifted).p_value < 0.001


def test_p_values_of_equal_samples_are_uniform():
    """About one in twenty lies below 0.05: the approximation and the pooling are sound."""
    dice = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(60)]
    below = sum(
        g_test(
            Counter(dice.choices(range(60), weights, k=800)), Counter(dice.choices(range(60), weights, k=800))
        ).p_value
        < 0.05
        for _ in range(200)
    )
    assert 1 <= below <= 25


def test_rare_cells_are_pooled():
    """Cells that the approximation cannot bear become one."""
    test = g_test({"often": 100, **dict.fromkeys(range(10), 1)}, {"often": 100, **dict.fromkeys(range(10, 20), 1)})
    assert 2 == test.cells
    assert 0.0 == test.g


def test_no_counts_are_refused():
    """An empty sample proves nothing."""
    with pytest.raises(ValueError, match="counts"):
        g_test({}, {"a": 3})
