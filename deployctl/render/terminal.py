"""Streams and styles: results on stdout, progress on stderr, plain where nobody looks."""

import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# Terminal controls, and characters that have text read in another order than it is written.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "magenta": "35"}


def neutral(text: str) -> str:
    """Text from a host without terminal controls (newline and tab stay) and bidirectional marks: shown, not obeyed."""
    return _CONTROLS.sub(_as_escape, text)


def _as_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def coloured(stream: TextIO) -> bool:
    """Whether to use colour on a stream."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def style(text: str, *names: str, stream: TextIO | None = None) -> str:
    """The text in a style, or as it is where there is no colour."""
    if not names or not coloured(stream or sys.stdout):
        return text
    return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"


def out(text: str = "") -> None:
    """One line of result."""
    sys.stdout.write(text + "\n")


def say(text: str = "") -> None:
    """One line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def worded(status: str) -> str:
    """A status as people say it: `rolled back`, `smoke failed`, `nothing running`."""
    return status.replace("_", " ").replace("-", " ")


def counted(number: int, one: str, many: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """`a, b and 3 more`."""
    known = list(names)
    if len(known) <= most:
        return ", ".join(known)
    return f"{', '.join(known[:most])} and {len(known) - most} more"


def duration(seconds: float) -> str:
    """`0.42 s`, `12 s`, `8 min 50 s`, `3 h 12 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    for name, size, below, smaller in (("d", 86400, 3600, "h"), ("h", 3600, 60, "min"), ("min", 60, 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {smaller}"
    return f"{whole} s"


def size(count: int | None) -> str:
    """`312 B`, `4.2 KiB`, `300 MiB`."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""


def table(rows: list[list[Any]], header: list[str]) -> list[str]:
    """Lines of a plain table, columns aligned, nothing cut."""
    texts = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *texts]) for column in range(len(header))]
    lines = [style("  ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip(), "dim")]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return lines


def when(seconds: float | None) -> str:
    """A moment in local time."""
    import time

    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
