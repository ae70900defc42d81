"""What a host sends is shown and not obeyed."""

import pytest

from deployctl.render.terminal import neutral


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\r", "\\x0d"),
        ("\x9b", "\\x9b"),
        ("if admin\u202e\u2066", "if admin\\u202e\\u2066"),
        ("\u200f\u061c\u2028", "\\u200f\\u061c\\u2028"),
        ("Zoë 漢字 مرحبا", "Zoë 漢字 مرحبا"),
    ],
)
def test_controls_and_marks_that_reorder_text_are_seen(text, shown):
    """Terminal controls and bidirectional marks as escapes; every script as it is."""
    assert shown == neutral(text)
