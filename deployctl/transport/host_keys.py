"""Is this the machine it was last time? Keys from OpenSSH's files; unknown ones asked about, changed ones refused."""

import base64
import hashlib
import hmac
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deployctl.errors import HostKeyError


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One matching line of a known_hosts file."""

    file: Path
    line: int
    marker: str
    type: str
    blob: bytes


def lookup_name(hostname: str, port: int) -> str:
    """How known_hosts calls a host: `[host]:port` unless the port is 22."""
    return hostname if port == 22 else f"[{hostname}]:{port}"


def known_keys(name: str, files: Sequence[Path]) -> tuple[KnownKey, ...]:
    """All lines for a host, hashed names included; unreadable files are passed over, as ssh does."""
    found: list[KnownKey] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            if len(fields) < 3 or fields[0].startswith("#"):
                continue
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            if len(fields) < 3 or not _names_match(fields[0], name):
                continue
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except ValueError:
                continue
            found.append(KnownKey(file, number, marker, fields[1], blob))
    return tuple(found)


def _names_match(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        _, _, salt, wanted = patterns.split("|", 3)
        digest = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(base64.b64encode(digest).decode(), wanted)
    import fnmatch

    matched = False
    for pattern in patterns.split(","):
        negated = pattern.startswith("!")
        # known_hosts knows * and ? alone; brackets belong to [host]:port.
        plain = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), plain.lower()):
            if negated:
                return False
            matched = True
    return matched


def fingerprint(blob: bytes) -> str:
    """`SHA256:...` as ssh shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def check(
    *,
    hostname: str,
    port: int,
    alias: str | None,
    key_type: str,
    blob: bytes,
    files: Sequence[Path],
    policy: Literal["strict", "accept-new"],
    ssh_strict: str = "ask",
) -> None:
    """Accept the key that a server has just proven to hold, or refuse.

    Args:
        hostname, port, alias: The host; HostKeyAlias replaces its name.
        key_type, blob: The offered key.
        files: known_hosts files, the user's first; a new key is added to the first.
        policy: `accept-new` adds unknown keys without asking.
        ssh_strict: ssh_config's StrictHostKeyChecking; `accept-new` and `yes` are honoured, `no` is not obeyed.

    Raises:
        HostKeyError: Changed, revoked, or unknown and not accepted.
    """
    name = alias or lookup_name(hostname, port)
    known = known_keys(name, files)
    shown = lookup_name(hostname, port) if port != 22 else f"[{hostname}]:{port}"
    for entry in known:
        if entry.marker == "@revoked" and entry.blob == blob:
            raise HostKeyError(f"the host key of {shown} is revoked by {entry.file}:{entry.line}")
    plain = [entry for entry in known if not entry.marker]
    if any(entry.blob == blob for entry in plain):
        return
    same_type = [entry for entry in plain if entry.type == key_type] or plain
    if same_type:
        entry = same_type[0]
        raise HostKeyError(
            f"the host key of {shown} has changed: it offers {key_type} {fingerprint(blob)}, "
            f"{entry.file}:{entry.line} has {entry.type} {fingerprint(entry.blob)}; nothing was sent",
            hint=f"if the machine was reinstalled: ssh-keygen -R '{name}' -f {entry.file}",
        )
    if any(entry.marker == "@cert-authority" for entry in known):
        raise HostKeyError(
            f"{shown} is known by a certificate authority only, which is not supported",
            hint=f"ssh-keyscan -p {port} {hostname} >> {files[0] if files else '~/.ssh/known_hosts'}",
        )
    if policy != "accept-new" and not (policy == "strict" and ssh_strict == "accept-new"):
        _ask(shown, key_type, blob, ssh_strict)
    _add(files, name, key_type, blob)


def _ask(shown: str, key_type: str, blob: bytes, ssh_strict: str) -> None:
    hint = "connect once with ssh to look at the key, or set `host_keys: accept-new` for this host in hosts.yaml"
    unknown = f"the host key of {shown} is not known: {key_type} {fingerprint(blob)}"
    if ssh_strict in ("yes", "true") or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HostKeyError(unknown, hint=hint)
    sys.stderr.write(f"{unknown}\nConnect, and remember this key? [yes/no] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() != "yes":
        raise HostKeyError(unknown, hint=hint)


def _add(files: Sequence[Path], name: str, key_type: str, blob: bytes) -> None:
    """Append one line to the user's first file, made with mode 0600 where it is missing."""
    if not files:
        return
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n"
    file = files[0]
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "rb+") as out:
            out.seek(0, os.SEEK_END)
            size = out.tell()
            if size:
                out.seek(size - 1)
                if out.read(1) != b"\n":
                    line = "\n" + line
            out.write(line.encode())
    except OSError as error:
        raise HostKeyError(f"the new host key of {name} cannot be written to {file}: {error.strerror}") from error
