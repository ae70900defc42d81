"""An attempt's log: its end, matches, a time range, the crash alone, or all of it; filtered here, sent as bytes."""

import mmap
import os
import re
import time

from . import attempts, crash, lock
from .failure import EXIT_USAGE, Failure

_CHUNK = 1 << 18
_LONGEST_LINE = 1 << 20
# At the start of a line, or where a progress bar ended its own by a carriage return.
_STAMP = re.compile(rb"(?m)(?:^|(?<=\r))\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_SINCE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_TICK_S = 0.05
# How often a follow asks whether the server still lives, and how long it listens to what a dead one left behind.
_LOOK_S = 0.3
_LAST_WORDS_S = 1.0


def logs(context):
    """Send what was asked of the newest (or the named) attempt's log as data."""
    args = context.args
    lock.reading(context)
    if args.get("list"):
        return {
            "status": "ok",
            "attempts": [attempts.summary(context, attempt) for attempt in attempts.told(context)],
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
        _send(context, attempt, result)
    except OSError as error:
        raise Failure(
            "the log of attempt %d cannot be read: %s: %s" % (attempt["attempt"], path, error.strerror),
            kind="log-missing",
            hint="deployctl logs --list",
        ) from error
    return result


def _send(context, attempt, result):
    """Send what was asked for of a log that is there."""
    args, path = context.args, attempt["log"]
    context.wire.event(
        "log",
        offset=args.get("from_offset"),
        **{key: result[key] for key in ("attempt", "log_tag", "log", "log_bytes", "state")},
    )
    if args.get("whole"):
        _send_range(context, path, 0, result["log_bytes"])
        return
    select = _Filter(args.get("grep"))
    start = _since(attempt, args["since"]) if args.get("since") else 0
    lines = args.get("lines")
    if lines is None and not args.get("since") and not args.get("grep"):
        lines = 100
    if args.get("from_offset") is not None:
        # A follow that lost its link: from where the client's bytes ended, unless the log was begun anew.
        position = min(args["from_offset"], result["log_bytes"])
    else:
        position = _send_tail(context, path, start, lines, select)
    if args.get("follow"):
        _follow(context, attempt, position, select)
        result["state"] = attempts.state_of(_now(context, attempt))


def _crash(context, attempt):
    verdict = attempt["verdict"] or {}
    found = verdict.get("crash")
    if found is None:
        state = attempts.state_of(attempt)
        scanner = crash.scan_log(attempt["log"])
        if state != attempts.CRASHED and scanner.cause() is None:
            return {"crash": None}
        found = crash.diagnose(context.state, attempt, scanner, attempt["exit"])
        if not os.path.exists(attempt["log"]):
            found["cause"] += " (its log is gone: %s)" % attempt["log"]
    return {"crash": found}


class _Filter:
    """Keeps the lines that match, without holding more than one line."""

    def __init__(self, pattern):
        self._pattern = None
        # A pattern that is plain text is looked for in whole blocks first: most hold nothing of it.
        self._literal = None
        if pattern and not set(pattern) & set("\\.^$*+?{}[]|()"):
            self._literal = pattern.encode("utf-8", "surrogateescape")
        if pattern:
            try:
                self._pattern = re.compile(pattern.encode("utf-8", "surrogateescape"))
            except (re.error, OverflowError, RecursionError) as error:
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
        if self._pattern is None:
            return True
        if b"\r" not in line:
            return self._pattern.search(line) is not None
        return any(self._pattern.search(part) for part in line.split(b"\r"))

    def of(self, block):
        """The kept lines of a block of whole lines."""
        if self._literal is not None and self._literal not in block:
            return []
        return [line for line in _lines(block) if self.keep(line)]


def _send_range(context, path, start, end):
    with open(path, "rb") as source:
        source.seek(start)
        while start < end and not _nobody_listens(context):
            chunk = source.read(min(_CHUNK, end - start))
            if not chunk:
                break
            context.wire.data(chunk)
            start += len(chunk)
    return start


def _nobody_listens(context):
    return context.wire.gone.is_set() or context.wire.cancelled.is_set()


def _send_tail(context, path, start, lines, select):
    """Send the last `lines` lines from `start` on that the filter keeps (all where None); returns the end reached."""
    end = os.stat(path).st_size
    if not select.active:
        if lines is not None:
            start = max(start, _start_of_last(path, lines, end))
        return _send_range(context, path, start, end)
    if lines is None:
        return _send_matches(context, path, start, end, select)
    kept = _last_matches(context, path, start, end, lines, select)
    if kept:
        context.wire.data(b"".join(kept))
    return end


def _send_matches(context, path, start, end, select):
    """Send every line that the filter keeps, in batches."""
    with open(path, "rb") as source:
        source.seek(start)
        rest = b""
        while start < end and not _nobody_listens(context):
            chunk = source.read(min(_CHUNK * 8, end - start))
            if not chunk:
                break
            start += len(chunk)
            block = rest + chunk
            cut = block.rfind(b"\n") + 1
            rest = block[cut:][-_LONGEST_LINE:]
            kept = b"".join(select.of(block[:cut]))
            if kept:
                context.wire.data(kept)
        if rest and select.keep(rest):
            context.wire.data(rest + b"\n")
    return end


def _last_matches(context, path, start, end, wanted, select):
    """The last `wanted` lines that the filter keeps, found from the end: what lies before them is not read."""
    found: list = []
    with open(path, "rb") as source:
        # What was read of a line whose beginning lies further ahead; None until the end of the file is known.
        rest = None
        while end > start and len(found) < wanted and not _nobody_listens(context):
            size = min(_CHUNK, end - start)
            end -= size
            source.seek(end)
            block = source.read(size)
            if rest is None:
                rest = b""
                block += b"" if block.endswith(b"\n") else b"\n"
            block += rest
            cut = (block.find(b"\n") + 1 or len(block)) if end > start else 0
            rest = block[:cut][-_LONGEST_LINE:]
            found = select.of(block[cut:]) + found
    return found[max(0, len(found) - wanted) :]


def _lines(block):
    return block.splitlines(True) if b"\r" not in block else [line + b"\n" for line in block.split(b"\n")[:-1]]


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


def _since(attempt, text):
    """Where the lines since a time begin, found by bisection over their time stamps.

    Raises:
        Failure: The text is no time, or the log has no time stamps and was written to since (exit 2).
    """
    wanted = _moment(text)
    found = os.stat(attempt["log"])
    size = found.st_size
    if size == 0:
        return 0
    with open(attempt["log"], "rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if _stamp_from(content, 0, size)[1] is None:
            return _without_stamps(attempt, wanted, found)
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            at, stamp = _stamp_from(content, middle, high)
            if stamp is None or stamp >= wanted:
                high = middle
            else:
                low = at + 1
        at, stamp = _stamp_from(content, low, size)
        return at if stamp is not None and stamp >= wanted else size


def _without_stamps(attempt, wanted, found):
    """What can be said of a log without time stamps: all of it is newer than its launch, none than its last change."""
    if wanted <= attempt["at"]:
        return 0
    if found.st_mtime < wanted:
        return found.st_size
    raise Failure(
        "the log of attempt %d has no time stamps, --since cannot be applied to it" % attempt["attempt"],
        kind="no-time-stamps",
        hint="deployctl logs -n 200, or --grep",
        exit_code=EXIT_USAGE,
    )


def _stamp_from(content, at, end):
    """(position, seconds) of the first time stamp that begins a line between `at` and `end`; (end, None): none."""
    # Found by its first bytes: a flood of lines without stamps is passed at the speed of memory.
    found = content.find(b"[2", at, end + 1)
    while found >= 0:
        match = _STAMP.match(content, found)
        if match:
            try:
                return found, time.mktime(time.strptime(match.group(1).decode(), "%Y-%m-%d %H:%M:%S"))
            except (ValueError, OverflowError):
                pass  # not a date after all
        found = content.find(b"[2", found + 1, end + 1)
    return end, None


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


def _follow(context, attempt, position, select):
    """Send what is written from now on, through truncation and rotation, until nobody listens or the server is gone."""
    path = attempt["log"]
    rest = b""
    looked_at = ended_at = None
    source = open(path, "rb")  # noqa: SIM115 - replaced by the next one when the log is rotated
    try:
        context.wire.event("position", offset=position)
        while not _nobody_listens(context):
            source.seek(position)
            chunk = source.read(_CHUNK)
            if chunk:
                position += len(chunk)
                rest = _send_kept(context, rest + chunk, select)
                context.wire.event("position", offset=position - len(rest))
                ended_at = ended_at and time.monotonic()
                continue
            following = _begun_anew(path, source, position)
            if following is not None:
                # What was written to the old one between the last look and the change of names is not lost.
                source.seek(position)
                last = source.read() if following is not source else b""
                _send_rest(context, _send_kept(context, rest + last, select), select)
                context.wire.event("truncated", log=path)
                if following is not source:
                    source.close()
                source, position, rest = following, 0, b""
                continue
            now = time.monotonic()
            if looked_at is None or now - looked_at > _LOOK_S:
                looked_at = now
                is_over = attempts.state_of(_now(context, attempt)) in attempts.FINAL
                ended_at = (ended_at or now) if is_over else None
            # A dead server writes no more; its last lines may still come from children.
            if ended_at is not None and now - ended_at > _LAST_WORDS_S:
                _send_rest(context, rest, select)
                context.wire.event("server-ended", attempt=attempt["attempt"])
                return
            context.wire.cancelled.wait(_TICK_S)
    finally:
        source.close()


def _now(context, attempt):
    """The attempt as its records are now; as it was where they were taken away or damaged meanwhile."""
    try:
        return attempts.load(context.state, attempt["attempt"]) or attempt
    except Failure:
        return attempt


def _begun_anew(path, source, position):
    """The file to go on with from its start, where the log was truncated (the same) or replaced (another)."""
    try:
        there = os.stat(path)
        here = os.fstat(source.fileno())
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return open(path, "rb")
    except OSError:
        return None  # between the two steps of a rotation, or moved away: the old file may still be written to
    return source if here.st_size < position else None


def _send_kept(context, block, select):
    """Send of a block what the filter keeps; returns the unfinished line that it ends with."""
    if not select.active:
        context.wire.data(block)
        return b""
    cut = block.rfind(b"\n") + 1
    kept = b"".join(select.of(block[:cut]))
    if kept:
        context.wire.data(kept)
    return block[cut:][-_LONGEST_LINE:]


def _send_rest(context, rest, select):
    """Send a last line that was never finished."""
    if rest and select.keep(rest):
        context.wire.data(rest + b"\n")
