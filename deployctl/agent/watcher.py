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
_CHUNK = 1 << 20
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
        """Whether something is known that the server does not survive: a terminal line, or a lost rank."""
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
        while self._read_log():
            pass
        self._caught_up = True
        if self.ended:
            return
        run = self.attempt["run"]
        if self.lost_rank is None and run is not None and not self.rebooted:
            self.lost_rank = self._ranks.look(run["pid"], force=look_at_ranks)
        if self.doomed:
            self._doomed_since = self._doomed_since or time.monotonic()
            if time.monotonic() - self._doomed_since > TERMINAL_GRACE_S:
                # A server that is being stopped may take its time to drain after its ranks have gone.
                self.ended = not self._is_being_stopped()

    def settle(self):
        """A scheduler that died takes the server with it within its grace: wait for that end, so as to name it."""
        self.tick(look_at_ranks=True)
        while self.doomed and not self.ended and not self._context.wire.cancelled.is_set():
            time.sleep(TICK_S)
            self.tick()

    def finish(self):
        """Read the rest of a log that nobody writes any more, its last line without an end included."""
        self.tick()
        rest, self._buffer = self._buffer, b""
        if rest:
            self._take(rest)

    def _is_being_stopped(self):
        verdict = self._context.state.read_json("attempts", self.attempt["attempt"], "verdict.json") or {}
        return "stopping" in verdict

    def _look_at_exit(self):
        if self.ended:
            return
        state, number = self._context.state, self.attempt["attempt"]
        if self.attempt["run"] is None:
            self.attempt["run"] = state.read_json("attempts", number, "run.json")
        run = self.attempt["run"]
        gone = run is not None and (self.rebooted or not processes.alive(run["pid"], run["start"]))
        # Read after the process was looked at: the record of one that was gone may have come since.
        self.exit = state.read_json("attempts", number, "exit.json")
        if self.exit is not None:
            self.attempt["exit"] = self.exit
            self.ended = True
        elif gone:
            self._missing_since = self._missing_since or time.monotonic()
            # The keeper writes its record within moments; without a keeper there will be none.
            kept = not self.rebooted and processes.alive(run["keeper_pid"], run["keeper_start"])
            if not kept or time.monotonic() - self._missing_since > _RECORD_GRACE_S:
                self.exit = self.attempt["exit"] = state.read_json("attempts", number, "exit.json")
                self.ended = True
        elif run is None and attempts.state_of(self.attempt) == attempts.CRASHED:
            self.ended = True  # its keeper never came to start it

    def _read_log(self):
        """Read one chunk; whether there may be more."""
        try:
            found = os.stat(self.attempt["log"])
            if self._inode is not None and (found.st_ino != self._inode or found.st_size < self._position):
                self._position, self._buffer = 0, b""  # rotated or truncated under us
            self._inode = found.st_ino
            if found.st_size == self._position:
                return False
            with open(self.attempt["log"], "rb") as source:
                source.seek(self._position)
                chunk = source.read(_CHUNK)
        except OSError:
            return False
        self._position += len(chunk)
        lines = crash.split(self._buffer + chunk)
        self._buffer = lines.pop()[-_LONGEST_LINE:]
        progress = None
        for line in lines:
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
