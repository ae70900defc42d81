"""Strict YAML: every value knows its file, line and key path, and nothing is guessed.

YAML quietly reads `no` as False, `022` as 18, `12:30:45` as 45045 and keeps the last of two equal keys; on a GPU server
each of these has cost somebody an evening. Here plain scalars stay text until a decoder asks for a type, and whatever
does not fit is a ConfigError that names file:line, key path and the nearest valid key.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from deployctl.errors import ConfigError

_MAX_NODES = 100_000
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_LONGEST_S = 30 * 86400.0
# Plain words that YAML 1.1 reads as something else than the text they look like.
_BOOLEAN_WORDS = {"yes", "no", "on", "off", "true", "false", "y", "n"}
_SURPRISES = re.compile(r"[-+]?0[0-7]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9]*)?|0[xob][0-9a-fA-F_]+")


def nearest(word: str, known: Iterable[str], *, most: int = 3) -> str:
    """`did you mean 'a' or 'b'?` for a word that is not among the known ones, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)
    return f"did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def seconds_of(text: str) -> float:
    """Seconds, from `90`, `90s`, `15m`, `1.5h`.

    Raises:
        ValueError: No duration, or one that bounds nothing: zero, or more than 30 days. Its text says what would do.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"should be a duration such as 30s or 15m, not {text!r}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"should be more than 0 and at most 30d, not {text.strip()}")
    return seconds


@dataclass(frozen=True, slots=True)
class Value:
    """One YAML value with its place.

    Attributes:
        raw: A dict of str → Value, a list of Values, or the scalar's text.
        plain: Whether a scalar was written without quotes.
        file, line: Where it begins; lines count from 1.
        path: The key path, such as `hosts.gpu-7.port`.
    """

    raw: Any
    plain: bool
    file: str
    line: int
    path: str

    # -- errors ------------------------------------------------------------------------------------------------------

    def fail(self, message: str, *, hint: str = "") -> NoReturn:
        """Raise ConfigError at this value's place."""
        where = f"{self.file}:{self.line}"
        raise ConfigError(f"{where} {self.path}: {message}" if self.path else f"{where} {message}", hint=hint)

    @property
    def is_null(self) -> bool:
        """Whether it is an empty value, `~` or `null`."""
        return self.plain and self.raw in ("", "~", "null")

    # -- maps and lists ----------------------------------------------------------------------------------------------

    def mapping(self) -> "dict[str, Value]":
        """Its entries; an empty value is an empty mapping."""
        if self.is_null:
            return {}
        if not isinstance(self.raw, dict):
            self.fail(f"should be a mapping (key: value), not {self._kind()}")
        return self.raw

    def fields(self, *known: str) -> "dict[str, Value]":
        """Its entries, of which every key must be among `known`."""
        entries = self.mapping()
        for key, value in entries.items():
            if key not in known:
                value.fail("unknown key", hint=nearest(key, known) or f"known here: {', '.join(known)}")
        return entries

    def sequence(self) -> "list[Value]":
        """Its items; an empty value is an empty list."""
        if self.is_null:
            return []
        if not isinstance(self.raw, list):
            self.fail(f"should be a list ([a, b]), not {self._kind()}")
        return self.raw

    # -- scalars -----------------------------------------------------------------------------------------------------

    def text(self, *, empty: bool = False) -> str:
        """A string. Refuses plain words that YAML itself would read as a boolean, a base-60 or an octal number."""
        word = self._scalar("text")
        if self.plain and (word.lower() in _BOOLEAN_WORDS or _SURPRISES.fullmatch(word) or word in ("~", "null")):
            self.fail(f"{word} is not text to YAML", hint=f"write it in quotes: {self._key()}: {word!r}")
        if not word and not empty:
            self.fail("is empty")
        return word

    def scalar_text(self) -> str:
        """The text of any scalar as it was written, for command arguments and environment values."""
        word = self._scalar("a single value")
        if self.plain and (word.lower() in _BOOLEAN_WORDS - {"true", "false"} or _SURPRISES.fullmatch(word)):
            self.fail(f"{word} is not text to YAML", hint=f"write it in quotes: {self._key()}: {word!r}")
        return word

    def boolean(self) -> bool:
        """True or false, spelled so."""
        word = self._scalar("true or false")
        if not self.plain or word.lower() not in ("true", "false"):
            self.fail(f"should be true or false, not {word!r}")
        return word.lower() == "true"

    def integer(self, *, least: int | None = None, most: int | None = None) -> int:
        """A whole number in decimal within bounds."""
        word = self._scalar("a whole number")
        if not self.plain or not _INTEGER.fullmatch(word):
            self.fail(f"should be a whole number, not {word!r}")
        number = int(word)
        if (least is not None and number < least) or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            self.fail(f"should be {bounds}, not {number}")
        return number

    def duration_s(self) -> float:
        """Seconds; see `seconds_of`."""
        try:
            return seconds_of(self._scalar("a duration"))
        except ValueError as error:
            self.fail(str(error))

    def texts(self) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(item.text() for item in self.sequence())

    def json(self) -> Any:
        """Plain data, for values that are passed on: numbers, booleans and null as JSON would read them."""
        if isinstance(self.raw, dict):
            return {key: value.json() for key, value in self.raw.items()}
        if isinstance(self.raw, list):
            return [value.json() for value in self.raw]
        if not self.plain:
            return self.raw
        if self.is_null:
            return None
        if self.raw in ("true", "false"):
            return self.raw == "true"
        if _INTEGER.fullmatch(self.raw):
            return int(self.raw)
        if _NUMBER.fullmatch(self.raw):
            return float(self.raw)
        return self.scalar_text()

    def _scalar(self, wanted: str) -> str:
        if not isinstance(self.raw, str):
            self.fail(f"should be {wanted}, not {self._kind()}")
        return self.raw

    def _key(self) -> str:
        return self.path.rpartition(".")[2] or "value"

    def _kind(self) -> str:
        if isinstance(self.raw, dict):
            return "a mapping"
        return "a list" if isinstance(self.raw, list) else repr(self.raw)


def load(path: Path, *, name: str = "") -> Value:
    """Read a YAML file.

    Args:
        path: The file; UTF-8, with or without BOM, any line ends.
        name: How errors call it; its path by default.

    Raises:
        ConfigError: Not readable, not UTF-8, not YAML, a duplicate key, a tag, or more than one document.
    """
    shown = name or str(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    return parse(content, shown)


def parse(content: bytes, name: str) -> Value:
    """The same, from bytes."""
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line} not UTF-8 text", hint="save the file as UTF-8") from error
    try:
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line} not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        position = getattr(error, "position", 0)
        line = text[:position].count("\n") + 1
        raise ConfigError(f"{name}:{line} not valid YAML: {getattr(error, 'reason', error)}") from error
    if node is None:
        return Value("", True, name, 1, "")
    return _Reader(name).value(node, "", ())


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def value(self, node: yaml.Node, path: str, inside: tuple[int, ...]) -> Value:
        line = node.start_mark.line + 1
        here = Value("", True, self._name, line, path)
        self._count += 1
        if self._count > _MAX_NODES or len(inside) > 64 or id(node) in inside:
            here.fail("nested too deeply, or aliases that expand without end")
        inside = (*inside, id(node))
        if isinstance(node, yaml.ScalarNode):
            if not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
                here.fail(f"tag {node.tag} is not supported")
            return Value(node.value, not node.style, self._name, line, path)
        if isinstance(node, yaml.SequenceNode):
            items = [self.value(item, f"{path}[{number}]", inside) for number, item in enumerate(node.value)]
            return Value(items, False, self._name, line, path)
        assert isinstance(node, yaml.MappingNode)
        entries: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                here.fail("keys must be plain words")
            key = key_node.value
            below = f"{path}.{key}" if path else key
            at_key = Value(key, not key_node.style, self._name, key_line, below)
            if key == "<<" and not key_node.style:
                at_key.fail("merge keys (<<) are not supported", hint="use defaults:, or repeat the keys")
            if key in entries:
                at_key.fail(f"duplicate key (first on line {entries[key].line})")
            value = self.value(value_node, below, inside)
            # Errors about an entry point at its key: that is where the reader looks for it.
            entries[key] = Value(value.raw, value.plain, self._name, key_line, below)
        return Value(entries, False, self._name, line, path)
