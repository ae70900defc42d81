"""Whether two samples can come from one distribution: the G-test, without scipy."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

_SMALLEST_EXPECTED = 5.0
_TERMS, _PRECISION = 10_000, 1e-15


class GTest(NamedTuple):
    """The outcome: G, its degrees of freedom, and the probability of a G at least that large by chance."""

    g: float
    degrees: int
    p_value: float
    cells: int


def g_test(first: Mapping[Hashable, int], second: Mapping[Hashable, int]) -> GTest:
    """Two samples of counts: homogeneous?

    Cells whose expected count is below 5 in either sample are pooled into one, as the chi-square approximation needs.
    """
    total_first, total_second = sum(first.values()), sum(second.values())
    if not total_first or not total_second:
        raise ValueError("both samples need counts")
    total = total_first + total_second
    smaller_share = min(total_first, total_second) / total
    columns: list[tuple[int, int]] = []
    rest_first = rest_second = 0
    for cell in sorted(set(first) | set(second), key=repr):
        one, two = first.get(cell, 0), second.get(cell, 0)
        if (one + two) * smaller_share < _SMALLEST_EXPECTED:
            rest_first, rest_second = rest_first + one, rest_second + two
        else:
            columns.append((one, two))
    if rest_first + rest_second:
        columns.append((rest_first, rest_second))
    g = 0.0
    for one, two in columns:
        for observed, row in ((one, total_first), (two, total_second)):
            if observed:
                g += 2 * observed * math.log(observed * total / (row * (one + two)))
    degrees = len(columns) - 1
    return GTest(g, degrees, chi_square_tail(g, degrees) if degrees else 1.0, len(columns))


def chi_square_tail(value: float, degrees: int) -> float:
    """P(chi-square with so many degrees of freedom >= value): the regularised upper incomplete gamma function."""
    if degrees < 1:
        raise ValueError("degrees of freedom must be positive")
    if value <= 0:
        return 1.0
    shape, x = degrees / 2, value / 2
    return 1.0 - _lower_series(shape, x) if x < shape + 1 else _upper_fraction(shape, x)


def _lower_series(shape: float, x: float) -> float:
    """P(shape, x) by its power series (Abramowitz and Stegun 6.5.29)."""
    term = total = 1.0 / shape
    for step in range(1, _TERMS):
        term *= x / (shape + step)
        total += term
        if term < total * _PRECISION:
            break
    return total * math.exp(-x + shape * math.log(x) - math.lgamma(shape))


def _upper_fraction(shape: float, x: float) -> float:
    """Q(shape, x) by its continued fraction (6.5.31), evaluated with Lentz's method."""
    tiny = 1e-300
    below = x + 1 - shape
    c, d = 1 / tiny, 1 / below
    value = d
    for step in range(1, _TERMS):
        numerator = -step * (step - shape)
        below += 2
        d = 1 / ((numerator * d + below) or tiny)
        c = (below + numerator / c) or tiny
        value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value * math.exp(-x + shape * math.log(x) - math.lgamma(shape))


def counts(values: list[Hashable]) -> Counter:
    """How often each occurs."""
    return Counter(values)
