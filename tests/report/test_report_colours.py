"""The palette of attempts: told apart with any colour vision, and seen on its background."""

import itertools
import re
from importlib import resources

import pytest

STYLE = (resources.files("deployctl.render.report") / "report.css").read_text()
# Machado, Oliveira, Fernandes 2009 (https://doi.org/10.1109/TVCG.2009.113), severity 1.0, on linear RGB.
VISIONS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
THEMES = {"light": 0, "dark": 1}


def palette(name):
    """[light, dark] of a variable of the style sheet, each as linear RGB."""
    found = re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", STYLE)
    assert found, name
    return [linear(found[1]), linear(found[2])]


def linear(text):
    channels = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]


def seen(colour, vision):
    return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, colour, strict=True)))) for row in VISIONS[vision]]


def lab(colour):
    """CIE L*a*b* (D65)."""
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116)
        for v in (sum(a * b for a, b in zip(row, colour, strict=True)) / w for row, w in zip(rows, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(a, b):
    return sum((one - other) ** 2 for one, other in zip(lab(a), lab(b), strict=True)) ** 0.5


def luminance(colour):
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), colour, strict=True))


def contrast(a, b):
    bright, dim = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISIONS)
def test_attempts_are_told_apart_by_their_colour(theme, vision):
    """Any two of the eight differ by more than 10 in L*a*b* (2.3 is just noticeable), the first five by more than 15."""
    colours = [seen(palette(f"series-{number}")[THEMES[theme]], vision) for number in range(8)]
    pairs = {(a, b): distance(colours[a], colours[b]) for a, b in itertools.combinations(range(8), 2)}
    assert {} == {pair: apart for pair, apart in pairs.items() if apart < (15 if max(pair) < 5 else 10)}


@pytest.mark.parametrize("theme", THEMES)
def test_ink_is_seen_on_its_paper(theme):
    """Lines have the contrast that WCAG 2.2 asks of graphics (3:1), texts that of texts (4.5:1)."""
    paper = palette("paper")[THEMES[theme]]
    graphics = [f"series-{number}" for number in range(8)]
    texts = ["ink", "muted", "link", "good", "bad", "doubtful", "open"]
    told = {name: contrast(palette(name)[THEMES[theme]], paper) for name in graphics + texts}
    assert {} == {name: ratio for name, ratio in told.items() if ratio < (4.5 if name in texts else 3)}
