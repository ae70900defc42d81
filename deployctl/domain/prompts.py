"""Prompts to measure a server with: the sets that ship, and files of the user, checked line by line."""

import codecs
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from deployctl import yamlconf
from deployctl.errors import ConfigError, UsageError

SHIPPED = ("coding", "agentic")
_ROLES = ("system", "user", "assistant", "tool")
_MOST_PROMPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts as they are sent to the host: JSON lines with `messages`."""

    name: str
    sha256: str
    count: int
    content: bytes

    def as_request(self) -> dict[str, Any]:
        """What the record says of them."""
        return {"name": self.name, "sha256": self.sha256, "count": self.count}


def load_prompts(word: str, root: Path) -> PromptSet:
    """A shipped set (`coding`, `agentic`), or a JSONL file: as written, or beside hosts.yaml.

    Each line is {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]} that ends in a user or tool
    turn.

    Raises:
        UsageError: No such set or file.
        ConfigError: A line is wrong; names file:line.
    """
    if word in SHIPPED:
        shipped = resources.files("deployctl").joinpath("prompts", f"{word}.jsonl")
        return read_prompts(shipped.read_bytes(), word, f"prompts/{word}.jsonl")
    for path in (Path(word).expanduser(), root / word):
        if path.is_file():
            if path.stat().st_size > _MOST_PROMPT_BYTES:
                raise UsageError(f"{path} is larger than 64 MiB: too much to send with every bench")
            try:
                return read_prompts(path.read_bytes(), path.name, word)
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    hint = yamlconf.nearest(word, SHIPPED) or f"a JSONL file, or one of: {', '.join(SHIPPED)}"
    raise UsageError(f"no prompts {word!r}", hint=hint)


def read_prompts(content: bytes, name: str, shown: str) -> PromptSet:
    """Check the lines of a prompt file.

    Args:
        content: The file.
        name: As the record calls the set.
        shown: As messages call the file.

    Raises:
        ConfigError: With file:line.
    """
    rows: list[bytes] = []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise _wrong(shown, number, f"is no JSON: {error}") from error
        rows.append(json.dumps({"messages": _messages(entry, shown, number)}).encode())
    if not rows:
        raise ConfigError(f"{shown}: no prompts", hint='one JSON object a line: {"prompt": "Write ..."}')
    normal = b"".join(row + b"\n" for row in rows)
    return PromptSet(name=name, sha256=hashlib.sha256(normal).hexdigest(), count=len(rows), content=normal)


def _wrong(shown: str, number: int, problem: str) -> ConfigError:
    hint = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    return ConfigError(f"{shown}:{number}: {problem}", hint=hint)


def _messages(entry: Any, shown: str, number: int) -> list[dict[str, str]]:
    if not isinstance(entry, dict):
        raise _wrong(shown, number, "should be an object")
    kinds = [key for key in ("prompt", "messages") if key in entry]
    if len(kinds) != 1:
        raise _wrong(shown, number, "needs `prompt` or `messages`" if not kinds else "has both `prompt` and `messages`")
    unknown = [key for key in entry if key not in kinds]
    if unknown:
        raise _wrong(shown, number, f"unknown key {unknown[0]!r}")
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or len(entry["prompt"].split()) < 2:
            raise _wrong(shown, number, "`prompt` should be a text of two words or more")
        return [{"role": "user", "content": entry["prompt"]}]
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise _wrong(shown, number, "`messages` should be a list of turns")
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise _wrong(shown, number, f"turn {place} should hold `role` and `content`, and nothing else")
        if message["role"] not in _ROLES:
            raise _wrong(shown, number, f"turn {place}: role {message['role']!r} is none of {', '.join(_ROLES)}")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise _wrong(shown, number, f"turn {place}: `content` should be a text")
    if messages[-1]["role"] not in ("user", "tool"):
        raise _wrong(shown, number, "the last turn should be the user's or a tool's: the model answers it")
    return messages
