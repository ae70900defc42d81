"""An attempt's log: its end, matches, a time range, the crash alone, or all of it; filtered here, sent as bytes."""

import collections
import mmap
import os
import re
import time

from . import attempts, crash, lock
from .failure import EXIT_USAGE, Failure

_CHUNK = 1 << 18
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_SINCE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_TICK_S = 0.05


def logs(context):
    """Send what was asked of the newest (or the named) attempt's log as data."""
    args = context.args
    lock.reading(context)
    if args.get("list"):
        return {
            "status": "ok",
            "attempts": [attempts.summary(context, attempt) for attempt in attempts.listing(context.state)],
        }
    attempt = attempts.choose(context.state, args.get("attempt"), args.get("log_tag"))
    path = attempt["log"]
    others = [
        other["attempt"]
        for other in attempts.listing(context.state)
        if other["log_tag"] == attempt["log_tag"] and other["attempt"] != attempt["attempt"]
    ]
    result = {
        "status": "ok",
        "attempt": attempt["attempt"],
        "log_tag": attempt["log_tag"],
        "log": path,
        "state": attempts.state_of(attempt),
        "same_tag": others,
    }
    if args.get("crash"):
        return dict(result, **_crash(context, attempt))
    try:
        result["log_bytes"] = os.stat(path).st_size
    except OSError as error:
        raise Failure(
            "the log of attempt %d cannot be read: %s: %s" % (attempt["attempt"], path, error.strerror),
            kind="log-missing",
            hint="deployctl logs --list",
        ) from error
    context.wire.event(
        "log",
        offset=args.get("from_offset"),
        **{key: result[key] for key in ("attempt", "log_tag", "log", "log_bytes", "state")},
    )
    if args.get("whole"):
        _send_range(context, path, 0, result["log_bytes"])
        return result
    select = _Filter(args.get("grep"))
    start = _since(path, args["since"]) if args.get("since") else 0
    lines = args.get("lines")
    if lines is None and not args.get("since") and not args.get("grep"):
        lines = 100
    if args.get("from_offset") is not None:
        # A follow that lost its link: from where the client's bytes ended, unless the log was begun anew.
        position = min(args["from_offset"], result["log_bytes"])
    else:
        position = _send_tail(context, path, start, lines, select)
    if args.get("follow"):
        _follow(context, attempt, path, position, select)
    return result


def _crash(context, attempt):
    verdict = attempt["verdict"] or {}
    found = verdict.get("crash")
    if found is None:
        state = attempts.state_of(attempt)
        scanner = crash.scan_log(attempt["log"])
        if state != attempts.CRASHED and scanner.cause() is None:
            return {"crash": None}
        found = crash.diagnose(context.state, attempt, scanner, attempt["exit"])
    return {"crash": found}


class _Filter:
    """Keeps the lines that match, without holding more than one line."""

    def __init__(self, pattern):
        self._pattern = None
        if pattern:
            try:
                self._pattern = re.compile(pattern.encode("utf-8", "surrogateescape"))
            except re.error as error:
                raise Failure(
                    "--grep %r is not a regular expression: %s" % (pattern, error),
                    kind="usage",
                    hint="escape it, for example with \\",
                    exit_code=EXIT_USAGE,
                ) from error

    @property
    def active(self):
        return self._pattern is not None

    def keep(self, line):
        """Whether to show a line; a progress bar's line counts by each of its states."""
        return self._pattern is None or any(self._pattern.search(part) for part in line.split(b"\r"))


def _send_range(context, path, start, end):
    with open(path, "rb") as source:
        source.seek(start)
        while start < end and not context.wire.gone.is_set():
            chunk = source.read(min(_CHUNK, end - start))
            if not chunk:
                break
            context.wire.data(chunk)
            start += len(chunk)
    return start


def _send_tail(context, path, start, lines, select):
    """Send the last `lines` lines from `start` on that the filter keeps (all where None); returns the end reached."""
    end = os.stat(path).st_size
    if not select.active:
        if lines is not None:
            start = max(start, _start_of_last(path, lines, end))
        return _send_range(context, path, start, end)
    if lines is None:
        _each_match(path, start, end, select, _Batches(context))
        return end
    kept: collections.deque = collections.deque(maxlen=lines)
    if lines:
        _each_match(path, start, end, select, kept)
    if kept:
        context.wire.data(b"".join(kept))
    return end


class _Batches:
    """Sends appended lines in chunks."""

    def __init__(self, context):
        self._wire = context.wire
        self._held = []
        self._size = 0

    def append(self, line):
        self._held.append(line)
        self._size += len(line)
        if self._size >= _CHUNK:
            self.flush()

    def flush(self):
        if self._held:
            self._wire.data(b"".join(self._held))
        self._held, self._size = [], 0


def _each_match(path, start, end, select, out):
    """Append every kept line to `out`.

    The pattern runs over whole chunks first: on a log of hundreds of megabytes that is what it can afford.
    """
    with open(path, "rb") as source:
        source.seek(start)
        rest = b""
        while start < end:
            chunk = source.read(min(_CHUNK * 8, end - start))
            if not chunk:
                break
            start += len(chunk)
            block = rest + chunk
            cut = block.rfind(b"\n") + 1
            block, rest = block[:cut], block[cut:][-(1 << 20) :]
            for line in block.splitlines(True) if b"\r" not in block else _lines(block):
                if select.keep(line):
                    out.append(line)
        if rest and select.keep(rest):
            out.append(rest if rest.endswith(b"\n") else rest + b"\n")
    if isinstance(out, _Batches):
        out.flush()


def _lines(block):
    return [line + b"\n" for line in block.split(b"\n")[:-1]]


def _start_of_last(path, lines, end):
    """Where the last `lines` lines begin, read backwards in chunks."""
    if lines <= 0:
        return end
    with open(path, "rb") as source:
        position, found = end, 0
        while position > 0:
            size = min(_CHUNK, position)
            position -= size
            source.seek(position)
            chunk = source.read(size)
            at = len(chunk)
            if position + size == end and chunk.endswith(b"\n"):
                at -= 1
            while True:
                at = chunk.rfind(b"\n", 0, at)
                if at < 0:
                    break
                found += 1
                if found == lines:
                    return position + at + 1
    return 0


def _since(path, text):
    """Where the lines since a time begin, found by bisection over their time stamps."""
    wanted = _moment(text)
    size = os.stat(path).st_size
    if size == 0:
        return 0
    with open(path, "rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            at, stamp = _stamp_from(content, content.rfind(b"\n", 0, middle) + 1, size)
            if stamp is None or stamp >= wanted:
                high = middle
            else:
                low = max(at + 1, middle + 1)
        at, stamp = _stamp_from(content, content.rfind(b"\n", 0, low) + 1, size)
        return at if stamp is not None and stamp >= wanted else size


def _stamp_from(content, at, size):
    """(position, seconds) of the first line at or after `at` that has a time stamp; (size, None) where none has."""
    while at < size:
        match = _STAMP.match(content[at : at + 24])
        if match:
            try:
                return at, time.mktime(time.strptime(match.group(1).decode(), "%Y-%m-%d %H:%M:%S"))
            except (ValueError, OverflowError):
                pass  # not a date after all
        following = content.find(b"\n", at)
        if following < 0:
            break
        at = following + 1
    return size, None


def _moment(text):
    match = _SINCE.fullmatch(text.strip())
    if match:
        return time.time() - float(match.group(1)) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)]
    for form in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text.strip(), form))
        except ValueError:
            continue
    for form in ("%H:%M:%S", "%H:%M"):
        try:
            clock = time.strptime(text.strip(), form)
        except ValueError:
            continue
        today = time.localtime()
        return time.mktime(today[:3] + (clock.tm_hour, clock.tm_min, clock.tm_sec) + today[6:])
    raise Failure(
        "--since %r is no time" % text,
        kind="usage",
        hint="10m, 2h, 14:30, or 2026-01-31 14:30",
        exit_code=EXIT_USAGE,
    )


def _follow(context, attempt, path, position, select):
    """Send what is written from now on, through truncation and rotation, until nobody listens or the server is gone."""
    inode = os.stat(path).st_ino
    rest = b""
    idle_after_end = 0
    context.wire.event("position", offset=position)
    while not context.wire.cancelled.is_set():
        try:
            found = os.stat(path)
        except OSError:
            time.sleep(_TICK_S)
            continue  # between the two steps of a rotation
        if found.st_ino != inode or found.st_size < position:
            context.wire.event("truncated", log=path)
            inode, position, rest = found.st_ino, 0, b""
        if found.st_size > position:
            idle_after_end = 0
            with open(path, "rb") as source:
                source.seek(position)
                chunk = source.read(_CHUNK)
            position += len(chunk)
            if select.active:
                block = rest + chunk
                cut = block.rfind(b"\n") + 1
                rest = block[cut:][-(1 << 20) :]
                chunk = b"".join(line for line in _lines(block[:cut]) if select.keep(line))
            if chunk:
                context.wire.data(chunk)
            context.wire.event("position", offset=position - len(rest))
            continue
        # A dead server writes no more; its last lines may still come from children.
        if not attempts.is_alive(attempts.load(context.state, attempt["attempt"])):
            idle_after_end += 1
            if idle_after_end > 20:
                context.wire.event("server-ended", attempt=attempt["attempt"])
                return
        time.sleep(_TICK_S)
