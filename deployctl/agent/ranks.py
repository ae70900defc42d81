"""The server's own processes that must not end before it does: schedulers, detokenizer, data-parallel controller.

An engine may live on without a rank and answer its health check for as long as it lives: SGLang 0.5.9 has no watchdog
for them, and its launcher waits rank by rank, so that one dead rank hangs the load for ever
(https://github.com/sgl-project/sglang/pull/20287, https://github.com/sgl-project/sglang/pull/18582). A rank that is
gone is as good an evidence of death as a line in the log.
"""

import os
import time

from . import processes

INTERVAL_S = 2.0
_TITLE = b"sglang::"
_CHILD_BEARING = b"sglang::data_parallel_controller"
# Their comings and goings belong to normal work.
_FREE_TO_GO = (b"sglang::tokenizer_worker", b"sglang::http_worker")


def children(pid):
    """Pids of a process's direct children, as the kernel lists them per thread; [] where it does not."""
    try:
        threads = os.listdir("/proc/%d/task" % pid)
    except OSError:
        return []
    found = []
    for thread in threads:
        try:
            with open("/proc/%d/task/%s/children" % (pid, thread), "rb") as source:
                found += [int(word) for word in source.read().split()]
        except OSError:
            continue  # a thread that ended, or a kernel without this file
    return found


def title_of(pid):
    """The process title (argv[0]) as bytes, b"" where there is none."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as source:
            return source.read(256).split(b"\0")[0].split(b" ")[0]
    except OSError:
        return b""


class Ranks:
    """Remembers the ranks of a server and notices the first that has gone."""

    def __init__(self):
        self._known = {}
        self._looked_at = None

    def look(self, pid, force=False):
        """The title and pid of a rank that is gone, such as "sglang::scheduler_TP1 (pid 4711)", or None.

        Looks at most every two seconds unless forced.
        """
        now = time.monotonic()
        if not force and self._looked_at is not None and now - self._looked_at < INTERVAL_S:
            return None
        self._looked_at = now
        todo = [pid]
        while todo:
            for child in children(todo.pop()):
                title = title_of(child)
                if not title.startswith(_TITLE) or title.startswith(_FREE_TO_GO):
                    continue
                start = processes.start_time(child)
                if start is not None:
                    self._known[child] = (start, title.decode("utf-8", "replace"))
                if title.startswith(_CHILD_BEARING):
                    todo.append(child)
        for known, (start, title) in self._known.items():
            if not processes.alive(known, start):
                return "%s (pid %d)" % (title, known)
        return None
