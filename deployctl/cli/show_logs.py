"""`logs`: bytes to stdout or a file, everything else to stderr."""

import codecs
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from deployctl.cli.session import Session
from deployctl.errors import UsageError
from deployctl.render import crash, text
from deployctl.render.terminal import neutral, out, say, size, style, worded
from deployctl.workflows import logs


class _Printer:
    """Writes log bytes as text: undecodable bytes escaped, controls neutralised on a terminal, hosts told apart."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._rest: dict[str, bytes] = {}
        self._tty = sys.stdout.isatty()

    def __call__(self, host: str, data: bytes) -> None:
        block = self._rest.get(host, b"") + data
        if not self._several and not self._tty:
            whole = _whole_characters(block)
            self._rest[host] = block[whole:]
            sys.stdout.buffer.write(_escaped(block[:whole]))
            sys.stdout.buffer.flush()
            return
        *lines, rest = block.split(b"\n")
        self._rest[host] = rest
        for line in lines:
            self._line(host, line)
        sys.stdout.flush()

    def _line(self, host: str, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2] if self._tty else line
        decoded = shown.decode("utf-8", "backslashreplace")
        prefix = f"{host} | " if self._several else ""
        out(prefix + (neutral(decoded) if self._tty else decoded))

    def flush(self) -> None:
        for host, rest in self._rest.items():
            if rest and not self._several and not self._tty:
                sys.stdout.buffer.write(_escaped(rest))
            elif rest:
                self._line(host, rest)
        sys.stdout.flush()


def _whole_characters(block: bytes) -> int:
    """How many bytes of a block are whole characters: the last one may go on in the next block."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    decoder.decode(block[-4:])
    pending = decoder.getstate()[0]
    return len(block) - len(pending)


def _escaped(block: bytes) -> bytes:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        return block.decode("utf-8", "backslashreplace").encode()
    return block


class _File:
    """Writes to a file beside the target and renames it when all has come: an earlier file is not lost half-way."""

    def __init__(self, target: Path) -> None:
        self._target = target
        folder = target.parent if str(target.parent) else Path()
        try:
            handle, self._temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=folder)
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}") from error
        self._file: BinaryIO = os.fdopen(handle, "wb")
        self.written = 0

    def __call__(self, _host: str, data: bytes) -> None:
        self._file.write(data)
        self.written += len(data)

    def close(self, *, keep: bool) -> None:
        self._file.close()
        if keep:
            os.chmod(self._temporary, 0o644)
            os.replace(self._temporary, self._target)
        else:
            os.unlink(self._temporary)


def show(session: Session, args: dict[str, Any], output: Path | None) -> None:
    """Run the workflow and show what it sends."""
    hosts = session.hosts
    several = len(hosts) > 1
    if output is not None and several:
        raise UsageError("--output takes one host's log", hint="name one host with --host")
    if session.as_json and args["follow"]:
        raise UsageError("--json and --follow exclude each other", hint="leave one out")
    if output is not None:
        _to_file(session, args, output)
        return
    collected = bytearray()
    printer = _Printer(several=several)
    sink: logs.OnData = (lambda _host, data: collected.extend(data)) if session.as_json else printer
    report = logs.logs(session.run(), hosts, args, sink)
    printer.flush()
    if session.as_json:
        extra = {} if args["list"] or args["crash"] else {"text": collected.decode("utf-8", "backslashreplace")}
        session.print_json({**report.as_json(), **extra})
        session.exit_with(report.exit_code)
        return
    for host in report.hosts:
        prefix = f"{host.name} | " if several else ""
        if host.error:
            say(prefix + style(f"error: {neutral(str(host.error['message']))}", "red", stream=sys.stderr))
            if host.error.get("hint"):
                say(f"{prefix}hint: {neutral(str(host.error['hint']))}")
        elif args["list"]:
            for line in text.logs_listing(host):
                out(prefix + line)
        elif args["crash"]:
            _crash(host.fields, prefix)
        else:
            same = host.fields.get("same_tag") or []
            state = worded(host.fields["state"])
            older = f"; same tag: attempt {', '.join(map(str, same))}" if same else ""
            say(
                style(
                    f"{prefix}attempt {host.fields['attempt']} ({host.fields['log_tag']}, {state}), "
                    f"{host.fields['log']}{older}",
                    "dim",
                    stream=sys.stderr,
                )
            )
            if args.get("follow") and host.fields["state"] == "crashed":
                say(f"{prefix}hint: deployctl logs --crash --attempt {host.fields['attempt']}")
    session.exit_with(report.exit_code)


def _crash(fields: Any, prefix: str) -> None:
    say(f"{prefix}attempt {fields['attempt']} ({fields['log_tag']}, {worded(fields['state'])}), {fields['log']}")
    if fields["crash"] is None:
        out(f"{prefix}no crash: attempt {fields['attempt']} is {worded(fields['state'])}")
        return
    for line in crash.card(fields["crash"]):
        out(prefix + line)


def _to_file(session: Session, args: dict[str, Any], output: Path) -> None:
    target = _File(output)
    done = False
    try:
        report = logs.logs(session.run(), session.hosts, args, target)
        done = report.exit_code == 0
    finally:
        target.close(keep=done)
    if not done or session.as_json:
        session.finish(report)
        return
    say(f"{size(target.written)} of attempt {report.hosts[0].fields['attempt']} in {output}")
