"""A crash as text: its cause first, then where it came from, and which lines a patch put there."""

from collections.abc import Mapping
from typing import Any

from deployctl.render.terminal import neutral, style


def card(found: Mapping[str, Any]) -> list[str]:
    """A crash card: cause, exit, frames, and the patched line."""
    ending = f"signal {found['signal']}" if found.get("signal") else f"exit status {found.get('exit_code')}"
    if not found.get("signal") and found.get("exit_code") is None:
        ending = "no exit record"
    lines = [style(f"  cause: {neutral(found['cause'])}", "bold", "red"), f"  ended: {ending}"]
    for frame in _frames_to_show(found.get("frames") or []):
        if frame is None:
            lines.append("    ...")
            continue
        owner = style(f"  <- {neutral(frame['patch'])}", "bold", "magenta") if frame.get("patch") else ""
        lines.append(f"    {_short(frame['file'])}:{frame['line']} in {neutral(frame['function'])}{owner}")
        if frame.get("text"):
            lines.append(f"      {neutral(frame['text'])}")
    patched = found.get("patched")
    if patched:
        where = f"{neutral(patched['file'])}:{patched['line']}"
        if patched["exact"]:
            lines.append(style(f"  patched line: {neutral(patched['patch'])}  {where}", "bold", "magenta"))
        else:
            lines.append(
                style(f"  in a file changed by {neutral(patched['patch'])}, but not in its lines: {where}", "magenta")
            )
        lines.append(f"    {neutral(patched['text'])}")
    elif not found.get("frames"):
        lines += [f"    | {neutral(line)}" for line in (found.get("tail") or [])[-6:]]
    return lines


def _frames_to_show(frames: list[dict[str, Any]], most: int = 8) -> list[dict[str, Any] | None]:
    """The innermost frames, and the patched ones however far out they lie; None stands for those left out."""
    chosen = [number for number, frame in enumerate(frames) if frame.get("patch") or number >= len(frames) - most]
    shown: list[dict[str, Any] | None] = []
    for position, number in enumerate(chosen):
        if position and number != chosen[position - 1] + 1:
            shown.append(None)
        shown.append(frames[number])
    return shown


def _short(path: str) -> str:
    """A frame's file from its package on: the folders above say nothing new in every line."""
    for part in ("/site-packages/", "/dist-packages/"):
        if part in path:
            return neutral(path.rpartition(part)[2])
    return neutral(path)
