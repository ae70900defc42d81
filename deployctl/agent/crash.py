"""Why a server died, from its log and its exit: the first cause, its frames, and the patch line among them.

Source of the texts: SGLang 0.5.9 to 0.5.23 as published, uvicorn, argparse, CPython's traceback module.
"""

import collections
import mmap
import os
import re
import signal
from typing import Any

from . import attempts, attribution, releases

_TRACEBACK = re.compile(rb"Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(rb'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?\s*$')
_STAMP = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?")
_CHAIN = re.compile(
    rb"^(During handling of the above exception, another exception occurred|"
    rb"The above exception was the direct cause of the following exception):"
)
_HIT = re.compile(rb"hit an exception")
# How an exception's own line begins: told from other ranks' lines that were printed in between.
_EXCEPTION = re.compile(rb"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failed|Failure|Timeout|Full|Empty)\b")
# Python draws groups of exceptions as a tree, from 3.11 on.
_GROUP = re.compile(rb"^ +\+ Exception Group Traceback ")
_BRANCH = re.compile(rb"^ +(?:\| ?|\+ )(.*)")
_FORK = re.compile(rb"^ +\+[-+]+( (?P<number>\d+) -+)?$")
# What the fault handler of a process says that dies in native code, innermost frame first.
_FAULT = re.compile(rb"^Current thread 0x[0-9a-f]+ .*\(most recent call first\):")
_FAULT_FRAME = re.compile(rb'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
# A line after which the server does not come back.
_TERMINAL = re.compile(
    rb"(Scheduler|Detokenizer\w*|TpModelWorker\w*|DataParallelController|TokenizerManager)[^:]{0,40} hit an exception"
    rb"|Received sigquit from a child process|SIGQUIT received\. signum=(3|None)"
    rb"|Subprocess \S+ \(pid=\d+\) crashed with exit code|Rank \d+ scheduler is dead"
    rb"|Initialization failed\. warmup error|\[Errno \d+\] error while attempting to bind on address"
)
# One line that is a cause by itself, most telling first. None begins with `.*`: on a long line that takes the square of
# its length, and a line may hold a whole request.
_SINGLE = (
    re.compile(rb"^[^\s:()]+( [^\s:()]+)?: error: .+"),  # argparse
    re.compile(rb"\[Errno 98\].*|[Aa]ddress already in use.*|Port \S+ is already in use.*"),
    re.compile(rb"Not enough memory\. Please try to increase.*"),
    re.compile(rb"Capture cuda graph failed:.*"),
    re.compile(rb"CUDA out of memory.*"),
    re.compile(rb"Out of memory even after retracting.*"),
    re.compile(rb"Scheduler watchdog timeout.*"),
    re.compile(rb"Watchdog caught collective operation timeout.*"),
    re.compile(rb"what\(\): .*"),
    re.compile(rb"Fatal Python error: .*|terminate called .*|Segmentation fault.*"),
    re.compile(rb"Subprocess \S+ \(pid=\d+\) crashed with exit code.*"),
    re.compile(rb"Rank \d+ scheduler is dead.*"),
    re.compile(rb"Exit code: -?\d+"),
    re.compile(rb"deployctl: cannot start the server: .*"),
    re.compile(rb"No module named .*"),
)
_WHOLE = tuple(
    rank for rank, pattern in enumerate(_SINGLE) if re.search(rb"already in use|CUDA out|No module", pattern.pattern)
)
_RANK_DEAD, _EXIT_CODE = (
    next(rank for rank, pattern in enumerate(_SINGLE) if pattern.pattern.startswith(begin))
    for begin in (b"Rank", b"Exit code")
)
_KILLED = re.compile(r"[Ee]xit code:? -(\d+)")
_SECONDARY = re.compile(
    rb"DistBackendError|Gloo|gloo|Connection (closed|reset)|BrokenPipeError|EOFError|KeyboardInterrupt|NCCL error"
)
# Signs of life: whatever traceback came before them was survived.
_PROGRESS = re.compile(
    rb"Decode batch|Prefill batch|Load weight (begin|end)|Capture .*graph (begin|end)|Memory pool end"
    rb'|Uvicorn running|fired up and ready|HTTP/[\d.]+" 200'
)
# Without one of these no pattern above matches: a large log is searched for them, and only where they stand is it read
# line by line. The second list matters while something is known that a sign of life would take back.
_TELLING = (
    b"Traceback", b"hit an exception", b"sigquit", b"SIGQUIT", b"crashed with exit code", b"scheduler is dead",
    b"warmup error", b"[Errno ", b"During handling of", b"direct cause of", b"Current thread 0x", b"usage: ",
    b"error: ", b"lready in use", b"Not enough memory", b"graph failed", b"ut of memory", b"atchdog ", b"what(): ",
    b"Fatal Python", b"terminate called", b"Segmentation fault", b"xit code: ", b"deployctl: cannot",
    b"No module named",
)  # fmt: skip
_LIVELY = (
    b"Decode batch", b"Prefill batch", b"Load weight", b"graph begin", b"graph end", b"Memory pool end",
    b"Uvicorn running", b"fired up and ready", b'" 200',
)  # fmt: skip
BLOCK_BYTES = 1 << 16
_LONGEST = 4096
_MOST_FRAMES = 200
_MOST_BLOCKS = 40
_WINDOW = 4 << 20
_MOST_INTERRUPTIONS = 100
_TAIL_BYTES = 8192

Frame = collections.namedtuple("Frame", "file line function text")


class _Block:
    """One traceback, or a chain of them."""

    def __init__(self, lead):
        self.lead = lead
        self.parts = []  # [[frames, exception line]] root first

    def new_part(self):
        self.parts.append([[], b""])


class CrashScanner:
    """Reads a log line by line and keeps what may explain a death, in bounded memory.

    Attributes:
        terminal: The first line that means death (bytes), or None.
        tail: The last lines.
    """

    def __init__(self):
        self.terminal = None
        self.tail: collections.deque = collections.deque(maxlen=40)
        self._blocks = []
        self._singles = {}
        self._open: Any = None
        self._chained = False
        self._interrupted = 0
        self._in_group = False
        self._in_fault = False
        self._fault_frames = []
        self._had_usage = False

    def quiet(self, block):
        """Whether whole lines (bytes) hold nothing that feed() would learn from; skip() then does in its place."""
        if self._open is not None or self._in_group or self._in_fault or self._chained:
            return False
        if any(token in block for token in _TELLING):
            return False
        pending = self._blocks or self._singles
        return not (pending and self.terminal is None and any(token in block for token in _LIVELY))

    def skip(self, block):
        """Keep the last of some quiet lines."""
        for line in split(block[-_TAIL_BYTES:]):
            if line.strip():
                self.tail.append(line[:2000])

    def feed(self, line):
        """Read one line (bytes, without its end)."""
        if line.strip():
            self.tail.append(line[:2000])
        if self._in_group or _GROUP.match(line):
            line = self._of_group(line)
        if self.terminal is None and _TERMINAL.search(line):
            self.terminal = line
        traceback = _TRACEBACK.search(line)
        if traceback:
            self._start(line[: traceback.start()])
            return
        if self._open is not None and self._inside(line):
            return
        if _CHAIN.match(line) and self._blocks:
            self._chained = True
            return
        if not line.strip() or self._of_fault(line):
            return
        self._had_usage = self._had_usage or line.startswith(b"usage: ")
        body = _STAMP.sub(b"", line)[:_LONGEST]
        for rank, pattern in enumerate(_SINGLE):
            match = pattern.search(body)
            # Compilers and others print "error:" too: argparse speaks of arguments, or has printed its usage before.
            if match and (rank > 0 or self._had_usage or b"argument" in match.group(0)):
                # With what stands before it on the line: an exception's name, a program's.
                whole = rank in _WHOLE and not match.group(0).startswith(b"[Errno")
                self._singles.setdefault(rank, (body if whole else match.group(0))[:1000])
                return
        if _PROGRESS.search(body) and self.terminal is None:
            self._blocks = [block for block in self._blocks if _HIT.search(block.lead)]
            self._singles.clear()

    def _start(self, lead):
        if self._chained and self._blocks and not _HIT.search(lead):
            self._open = self._blocks[-1]
        else:
            self._open = _Block(lead)
            if len(self._blocks) < _MOST_BLOCKS:
                self._blocks.append(self._open)
        self._chained = False
        self._interrupted = 0
        self._open.new_part()

    def _of_group(self, line):
        """A line of an exception group without the tree that is drawn around it; a sub-exception counts as a cause."""
        self._in_group = line.startswith(b" ")
        fork = _FORK.match(line)
        if fork:
            self._open = None
            self._chained = fork.group("number") == b"1"
            return b""
        branch = _BRANCH.match(line)
        return branch.group(1) if branch else line

    def _of_fault(self, line):
        """Whether the line is of the fault handler's stack."""
        if _FAULT.match(line):
            self._in_fault = not self._fault_frames
            return True
        match = _FAULT_FRAME.match(line) if self._in_fault else None
        if match is None:
            self._in_fault = False
            return False
        if len(self._fault_frames) < _MOST_FRAMES:
            place = Frame(_text(match.group("file")), int(match.group("line")), _text(match.group("function")), "")
            self._fault_frames.append(place)
        return True

    def _inside(self, line):
        """Whether the line belongs to the open traceback."""
        frames, _ = self._open.parts[-1]
        match = _FRAME.match(line)
        if match:
            if len(frames) < _MOST_FRAMES:
                function = match.group("function") or b""
                frames.append([_text(match.group("file")), int(match.group("line")), _text(function), ""])
            return True
        if line.startswith((b" ", b"\t")) or (not line.strip() and not frames):
            text = line.strip()
            # Under the source line stand marks (^^^^); the last frame's text is the first line that is none.
            if frames and not frames[-1][3] and text.strip(b"^~ "):
                frames[-1][3] = _text(text)
            return True
        if not line.strip():
            self._open = None
            return False
        if _STAMP.match(line) or ((self._interrupted or not frames) and not _EXCEPTION.match(line)):
            # Another rank's line: several write to one log, and this traceback may go on after it.
            self._interrupted += 1
            if self._interrupted > _MOST_INTERRUPTIONS:
                self._open = None
            return False
        self._open.parts[-1][1] = line[:1000]
        self._open = None
        return True

    def cause(self):
        """(cause line, frames root first, frames by exception) of the first cause; None where nothing is known."""
        block = self._chosen()
        if block is not None:
            frames = [Frame(*frame) for part in block.parts for frame in part[0]]
            last = [part[1] for part in block.parts if part[1]]
            if last:
                return _text(last[-1].strip()), frames, [[Frame(*frame) for frame in part[0]] for part in block.parts]
        if not self._singles:
            return None
        first = min(self._singles)
        cause = _text(self._singles[first].strip())
        if first == _RANK_DEAD and _EXIT_CODE in self._singles:
            cause = "%s; %s" % (cause.partition(".")[0], _text(self._singles[_EXIT_CODE]))
        stack = self._fault_frames[::-1]
        return _explained(cause), stack, [stack]

    @property
    def only_consequences(self):
        """Whether all it knows is what others' ends leave in a log (a client that hung up, a peer that died).

        None of it ended the server where a signal did and the log says nothing of an end.
        """
        block = self._chosen()
        return (
            self.terminal is None
            and not self._singles
            and block is not None
            and not _HIT.search(block.lead)
            and _SECONDARY.search(block.parts[-1][1]) is not None
        )

    def _chosen(self):
        done = [block for block in self._blocks if any(part[1] for part in block.parts)]
        for block in done:
            if _HIT.search(block.lead):
                return block
        if self._singles and min(self._singles) == 0:
            return None  # argparse explains itself
        primary = [block for block in done if not _SECONDARY.search(block.parts[-1][1])]
        return (primary or done or [None])[0]


def _explained(cause):
    """A negative exit code in words."""
    match = _KILLED.search(cause)
    if match is None:
        return cause
    try:
        name = signal.Signals(int(match.group(1))).name
    except ValueError:
        return cause
    why = "; the kernel's out-of-memory killer ends processes so: dmesg" if name == "SIGKILL" else ""
    return "%s (%s%s)" % (cause, name, why)


def _text(raw):
    return raw.decode("utf-8", "backslashreplace")


def scan_log(path):
    """A scanner that has read what matters of a log, however large: from its first exception, and its end."""
    scanner = CrashScanner()
    try:
        size = os.path.getsize(path)
        if size == 0:
            return scanner
        with open(path, "rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if size <= 2 * _WINDOW:
                starts = [0]
            else:
                tail = size - _WINDOW
                starts = [at for at in (content.find(b"hit an exception"),) if 0 <= at < tail] + [tail]
            for at in starts:
                _feed_window(scanner, content, at)
            if scanner.cause() is None and starts[-1] > 0:
                # Much may be printed after what killed it, such as the stacks of all threads.
                at = content.rfind(b"Traceback (most recent call last):", 0, starts[-1])
                if at >= 0:
                    found = CrashScanner()
                    _feed_window(found, content, at)
                    if found.cause() is not None:
                        found.terminal, found.tail = found.terminal or scanner.terminal, scanner.tail
                        return found
    except OSError:
        pass  # the caller tells about a missing log
    return scanner


def _feed_window(scanner, content, at):
    """Have a scanner read some megabytes from the line on that holds `at`."""
    start = content.rfind(b"\n", max(0, at - _LONGEST), at) + 1 or at
    for block in blocks(content[start : start + 2 * _WINDOW]):
        if scanner.quiet(block):
            scanner.skip(block)
        else:
            for line in split(block):
                scanner.feed(line)


def blocks(content):
    """Bytes in pieces of some BLOCK_BYTES that end where a line does; the last may end anywhere."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", min(len(content), start + BLOCK_BYTES)) + 1 or len(content)
        yield content[start:end]
        start = end


def split(content):
    """Lines of log bytes: progress bars end theirs with a carriage return."""
    return re.split(rb"\r\n|\n|\r", content)


def diagnose(state, attempt, scanner, ended):
    """The contract's `crash` of an attempt.

    Args:
        state: The state directory.
        attempt: The attempt.
        scanner: A CrashScanner that has read its log.
        ended: exit.json's {"status", "signal", "reason"?}, or None where the process lives or left no record.

    Returns:
        {"cause", "exit_code", "signal", "frames", "patched", "log", "tail"}.
    """
    ended = ended or {}
    found = scanner.cause()
    if ended.get("signal") and scanner.only_consequences:
        found = None
    frames, patched = [], None
    if found is None:
        cause = _from_exit(ended, scanner)
    else:
        cause, flat, parts = found
        frames, patched = _attribute(state, attempt, flat, parts)
    if not ended and scanner.terminal is None:
        if attempts.rebooted(attempt):
            cause = "the machine was started anew while the server ran"
        elif found is None and attempt["run"] is None:
            cause = "it was never started: its keeper left no record"
    return {
        "cause": cause,
        "exit_code": ended.get("status"),
        "signal": ended.get("signal"),
        "frames": frames,
        "patched": patched,
        "log": attempt["log"],
        "tail": [_text(line) for line in list(scanner.tail)[-12:]],
    }


def _from_exit(ended, scanner):
    last = _text(scanner.tail[-1].strip()) if scanner.tail else ""
    if ended.get("reason"):
        return "cannot start the server: %s" % ended["reason"]
    if ended.get("signal"):
        why = "; the kernel's out-of-memory killer ends processes so (dmesg)" if ended["signal"] == "SIGKILL" else ""
        return "ended by %s%s" % (ended["signal"], why)
    if ended.get("status") is not None:
        return "ended with exit status %d%s" % (ended["status"], ": " + last if last else " without a word")
    return "the process is gone and left no exit record" + (": " + last if last else "")


def _attribute(state, attempt, flat, parts):
    """Frames with the patch whose line they are on, and the one to look at first."""
    try:
        release = releases.load(state, attempt["release"], attempt.get("base"))
    except Exception:
        release = None  # frames without patches are still worth showing
    owners, root = {}, None
    if release is not None and release["patches"]:
        root = os.path.realpath(release["package_dir"])
        names = {_relative(frame.file, root) for frame in flat}
        owners = attribution.added_lines(state, release, names)
    described: list = []
    exact: list = []
    nearby: list = []
    for part in parts:
        # The root exception's own frames decide; what was raised while handling it comes later.
        decided = bool(exact)
        for frame in part:
            relative = _relative(frame.file, root) if root else None
            owner = owners.get(relative, {}).get(frame.line)
            described.append(
                {"file": frame.file, "line": frame.line, "function": frame.function, "text": frame.text, "patch": owner}
            )
            if owner and not decided:
                exact.append((frame, owner, relative))
            elif relative in owners:
                refs = [layer["ref"] for layer in release["patches"] if relative in layer["files"]]
                nearby.append((frame, refs[-1], relative))
    chosen = exact or nearby
    if not chosen:
        return described, None
    frame, owner, relative = chosen[-1]
    return described, {
        "patch": owner,
        "file": relative,
        "line": frame.line,
        "text": attribution.line_of(state, release, relative, frame.line) or frame.text,
        "function": frame.function,
        "exact": bool(exact),
    }


def _relative(path, root):
    """A frame's file relative to the package, or None outside of it."""
    real = os.path.realpath(path)
    if root and real.startswith(root + os.sep):
        return real[len(root) + 1 :]
    return None
