"""Reads one attempt's log and exit record as they grow: what happened so far, and whether the server is gone.

Death is an exit record, a process that is gone, or a terminal line (or a lost rank) that the server did not survive for
long. Silence, refused connections and 503 are nothing of the kind.
"""

import os
import re
import time

from . import attempts, crash, phases, processes, ranks

TICK_S = 0.03
TERMINAL_GRACE_S = 10.0
# The longest that anybody waits for a doomed server to end: it may be draining, or hang in a driver.
SETTLE_S = 120.0
_CHUNK = 1 << 20
# A server may print faster than lines can be read: a look at the log ends, so that its exit and Ctrl-C are seen.
_LOOK_S = 0.2
_LAST_LOOK_S = 0.4
_RECORD_GRACE_S = 1.0
_LONGEST_LINE = 65536
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


class Watcher:
    """Follows one attempt; call `tick()` often.

    Args:
        context: Of the operation.
        attempt: The attempt; its `run` and `exit` are brought up to date.
        from_end: Leave what the log holds already unread.

    Attributes:
        ended: Whether the server is gone for good, or as good as.
        exit: exit.json, or None.
        lost_rank: The rank that is gone while its server lives on, or None.
        phase: phases.State.
        late: Whether the ready line was in the log already when we came, and its time is that of its stamp.
        behind: Whether the log holds more than was read.
        log_fault: What happened to the log (moved, deleted, truncated), or "".
    """

    def __init__(self, context, attempt, from_end=False):
        self._context = context
        self.attempt = attempt
        self.scanner = crash.CrashScanner()
        self.phase = phases.State(since=attempt["at"], every_rank=attempt["rank"] > 0)
        self.ended = False
        self.exit = None
        self.lost_rank = None
        self.last_line = b""
        self.late = False
        self.behind = False
        self.log_fault = ""
        self._boot_id = processes.boot_id()
        self._ranks = ranks.Ranks()
        self._buffer = b""
        self._inode = None
        self._position = 0
        self._caught_up = from_end
        self._doomed_since = None
        self._missing_since = None
        if from_end:
            try:
                found = os.stat(attempt["log"])
                self._position, self._inode = found.st_size, found.st_ino
            except OSError:
                pass  # tick() meets the same file

    @property
    def doomed(self):
        """Whether the server is known not to survive: a terminal line, a lost rank, or it has gone already.

        One that is gone is doomed and not yet `ended` while its keeper may still write down how.
        """
        return self._condemned or self._missing_since is not None

    @property
    def _condemned(self):
        return self.scanner.terminal is not None or self.lost_rank is not None

    @property
    def rebooted(self):
        """Whether the machine was started anew since the launch."""
        return self.attempt["boot_id"] != self._boot_id

    def now(self):
        """Wall-clock seconds, not moved by whoever sets the clock during the load."""
        return self.attempt["at"] + attempts.age_s(self.attempt)

    def tick(self, look_at_ranks=False):
        """Read what is new; cheap when nothing is.

        Args:
            look_at_ranks: Do so now; otherwise every two seconds.
        """
        self._look_at_exit()
        self._read_for(_LOOK_S)
        if self.ended:
            return
        run = self.attempt["run"]
        if self.lost_rank is None and run is not None and not self.rebooted:
            self.lost_rank = self._ranks.look(run["pid"], force=look_at_ranks)
        if self._condemned:
            self._doomed_since = self._doomed_since or time.monotonic()
            if time.monotonic() - self._doomed_since > TERMINAL_GRACE_S:
                # A server that is being stopped may take its time to drain after its ranks have gone.
                self.ended = not self._is_being_stopped()

    def settle(self):
        """Wait for the end of a server that is doomed, so as to name it: nobody may say that it is left running.

        A scheduler that died takes the server with it within its grace; the record of one that is gone comes soon.
        """
        self.tick(look_at_ranks=True)
        finish = time.monotonic() + SETTLE_S
        while (self.doomed or self.behind) and not self.ended and not self._context.wire.cancelled.is_set():
            if time.monotonic() > finish:
                return  # it is being stopped, and does not end
            if not self.behind:
                time.sleep(TICK_S)
            self.tick()

    def finish(self):
        """Read the rest of a log that nobody writes any more, its last line without an end included."""
        self.tick()
        if self.behind:
            self._read_for(_LAST_LOOK_S)
        if self.behind:
            # Too much to read line by line now that the server is gone and somebody waits: its end says why.
            self.scanner = crash.scan_log(self._source())
            return
        rest, self._buffer = self._buffer, b""
        if rest:
            self._take(rest)

    def _read_for(self, seconds):
        """Read the log up to its end, or for so long."""
        finish = time.monotonic() + seconds
        self.behind = self._read_log()
        while self.behind and time.monotonic() < finish:
            self.behind = self._read_log()
        if not self.behind:
            self._caught_up = True

    def _is_being_stopped(self):
        verdict = attempts.record(self._context.state, self.attempt["attempt"], "verdict") or {}
        return "stopping" in verdict

    def _look_at_exit(self):
        if self.ended:
            return
        state, number = self._context.state, self.attempt["attempt"]
        if self.attempt["run"] is None:
            self.attempt["run"] = attempts.record(state, number, "run")
        run = self.attempt["run"]
        gone = run is not None and (self.rebooted or not processes.alive(run["pid"], run["start"]))
        # Read after the process was looked at: the record of one that was gone may have come since.
        self.exit = attempts.record(state, number, "exit")
        if self.exit is not None:
            self.attempt["exit"] = self.exit
            self.ended = True
        elif gone:
            self._missing_since = self._missing_since or time.monotonic()
            # The keeper writes its record within moments; without a keeper there will be none.
            kept = not self.rebooted and processes.alive(run["keeper_pid"], run["keeper_start"])
            if not kept or time.monotonic() - self._missing_since > _RECORD_GRACE_S:
                self.exit = self.attempt["exit"] = attempts.record(state, number, "exit")
                self.ended = True
        elif run is None and attempts.state_of(self.attempt) == attempts.CRASHED:
            self.ended = True  # its keeper never came to start it

    def _source(self):
        """The file that the server writes to: its log, or where that was moved or deleted, what it holds open."""
        path = self.attempt["log"]
        try:
            found = os.stat(path).st_ino
        except OSError:
            found = None
        ours = self._inode or self.attempt.get("log_inode")
        if ours is None or found == ours or self.attempt["run"] is None:
            return path
        held = "/proc/%s/fd/1" % self.attempt["run"]["pid"]
        try:
            if os.stat(held).st_ino != ours:
                return path
        except OSError:
            return path  # gone, or no /proc here
        self.log_fault = "the log was %s under the server" % ("deleted" if found is None else "moved away")
        return held

    def _read_log(self):
        """Read one chunk; whether there may be more."""
        try:
            source_path = self._source()
            found = os.stat(source_path)
            if self._inode is not None and (found.st_ino != self._inode or found.st_size < self._position):
                self._position, self._buffer = 0, b""  # rotated or truncated under us
                self.log_fault = "the log was truncated or replaced while it was read"
            self._inode = found.st_ino
            if found.st_size == self._position:
                return False
            with open(source_path, "rb") as source:
                source.seek(self._position)
                chunk = source.read(_CHUNK)
        except OSError:
            return False
        self._position += len(chunk)
        content = self._buffer + chunk
        whole = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        self._buffer = content[whole:][-_LONGEST_LINE:]
        progress = None
        for block in crash.blocks(content[:whole]):
            if self.scanner.quiet(block) and phases.quiet(self.phase, block):
                self.scanner.skip(block)
                self.last_line = self.scanner.tail[-1] if self.scanner.tail else self.last_line
                continue
            for line in crash.split(block):
                progress = self._take(line) or progress
        if progress is not None and progress["name"] == self.phase.phase and not self.phase.ready_line:
            self._context.wire.event("phase", **progress)
        return len(chunk) == _CHUNK

    def _take(self, line):
        """Read one line; returns the fields of a progress event that a later line of the same chunk makes stale."""
        self.scanner.feed(line)
        if line.strip():
            self.last_line = line
        ready_before = self.phase.ready_line
        self.phase, events = phases.advance(self.phase, line, self._when(line))
        if self.phase.ready_line and not ready_before:
            self.late = not self._caught_up
        for event in events:
            kind = event.pop("event")
            if event.get("state") == "progress":
                return event
            self._context.wire.event(kind, **event)
        return None

    def _when(self, line):
        """Now for lines as they come; for those written before we attached, their own time stamp."""
        if self._caught_up:
            return self.now()
        match = _STAMP.match(line)
        if match is None:
            return self.phase.since
        stamp = time.mktime(time.strptime(match.group(1).decode(), "%Y-%m-%d %H:%M:%S"))
        return max(self.phase.since, stamp)
