"""In what attempts differ: server arguments, environment, engine, machine, load phases, patched files. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployctl.domain.compare import Side

_FLAG = "(set)"
# Told by the server; the others that it tells are asked for by arguments of the same name, or say nothing new.
_TOLD_ANYWAY = {"model_path", "tokenizer_path", "engine", "engine_version", "gpus"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting in which sides differ.

    Attributes:
        kind: "run" (what and where), "argument" (command line), "environment", or "server" (what it said of itself).
        name: Of the setting.
        values: One for each side; None where it is not set.
    """

    kind: str
    name: str
    values: tuple[str | None, ...]


def options_of(argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """A command line as its first words and its options, by name with dashes.

    A repeated option has its last value, as argparse reads it; several values stand together; a flag is `(set)`.
    """
    head: list[str] = []
    options: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            options[name.replace("_", "-")] = current
        elif current is None:
            head.append(word)
        else:
            current.append(word)
    return tuple(head), {name: " ".join(values) or _FLAG for name, values in options.items()}


def differences(sides: Sequence[Side]) -> list[Difference]:
    """Everything in which the sides differ, in the order in which it is looked for."""
    found: list[Difference] = []

    def look(kind: str, name: str, values: Sequence[Any]) -> None:
        texts = tuple(_text(value) for value in values)
        if len(set(texts)) > 1:
            found.append(Difference(kind, name, texts))

    settings = [side.record.settings if side.record else {} for side in sides]
    look("run", "host", [side.host for side in sides])
    look("run", "GPUs", [said.get("gpus") or list(side.gpus) for said, side in zip(settings, sides, strict=True)])
    versions = [
        said.get("engine_version") or side.attempt["version"] for said, side in zip(settings, sides, strict=True)
    ]
    look("run", "engine version", versions)
    look("run", "patches", [" + ".join(side.attempt["patches"]) or "base" for side in sides])
    look("run", "profile", [side.attempt["profile"] for side in sides])
    look("run", "nodes", [side.attempt["nodes"] for side in sides])
    lines = [options_of(side.attempt["argv"]) for side in sides]
    look("argument", "command", [" ".join(head) for head, _ in lines])
    names = list(dict.fromkeys(name for _, options in lines for name in options))
    for name in names:
        look("argument", f"--{name}", [options.get(name) for _, options in lines])
    for name in sorted({name for side in sides for name in side.attempt["env"]}):
        look("environment", name, [side.attempt["env"].get(name) for side in sides])
    if all(settings):
        asked = {one.name[2:].replace("-", "_") for one in found if one.kind == "argument"}
        for name in sorted({name for said in settings for name in said} - asked - _TOLD_ANYWAY):
            values = [said.get(name) for said in settings]
            # What one server does not say is not known, and no difference.
            if all(value is not None for value in values):
                look("server", name, values)
    return found


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        counted = {str(item): list(value).count(item) for item in value}
        return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items()) or None
    return str(value)


def phases(sides: Sequence[Side]) -> list[tuple[str, tuple[float | None, ...]]]:
    """The load phases of all sides in order with their seconds, and `ready`, the whole; None where there was none."""
    told = [{phase["name"]: phase["seconds"] for phase in side.attempt["phases"]} for side in sides]
    names = list(dict.fromkeys(name for one in told for name in one))
    table = [(name, tuple(one.get(name) for one in told)) for name in names]
    ready = tuple(side.attempt["ready_seconds"] for side in sides)
    if table or any(seconds is not None for seconds in ready):
        table.append(("ready", ready))
    return table


def file_diff(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> str:
    """A unified diff in git's form between two sets of files.

    Args:
        before, after: {path: text, or None where there is no such file}; a path that one lacks is not looked at.
    """
    lines = []
    for path in sorted(before.keys() & after.keys()):
        old, new = before[path], after[path]
        if old == new:
            continue
        lines.append(f"diff --git a/{path} b/{path}\n")
        if old is None or new is None:
            lines.append(f"{'new' if old is None else 'deleted'} file mode 100644\n")
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        for line in difflib.unified_diff(_lines(old), _lines(new), *names):
            lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


def _lines(text: str | None) -> list[str]:
    """Lines as diffs count them: only a newline ends one."""
    *whole, last = (text or "").split("\n")
    return [f"{line}\n" for line in whole] + ([last] if last else [])
