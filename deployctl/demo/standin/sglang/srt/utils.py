"""Log lines and progress bars in the engine's formats, and a child's bond to its parent."""

import ctypes
import os
import resource
import signal
import time


def _write(handle, text):
    # One write a line: several processes share the log, and their lines must not mix.
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(handle, data) :]


def log(text, mark=""):
    """A line of the engine's logger: stderr, with time stamp and the rank's mark (such as " TP0")."""
    _write(2, "[%s%s] %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), mark, text))


def access_log(text):
    """A line of the HTTP server's access log: stdout."""
    _write(1, "[%s] INFO:     %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), text))


def clock(seconds):
    """Seconds as a progress bar shows them."""
    return "%02d:%02d" % divmod(int(seconds), 60)


def shards_progress(label, done, total, elapsed_s):
    """One state of the weight loader's bar: a carriage return and no newline before the last state."""
    rate = done / elapsed_s if done and elapsed_s else 0
    timing = "%s<%s, %5.2fit/s" % (clock(elapsed_s), clock((total - done) / rate), rate) if rate else "00:00<?, ?it/s"
    end = "\n" if done == total else ""
    _write(2, "\r%s: %3d%% Completed | %d/%d [%s]%s" % (label, 100 * done // total, done, total, timing, end))


def bar_progress(label, done, total, elapsed_s):
    """One state of a tqdm bar: a carriage return and no newline before the last state."""
    rate = done / elapsed_s if done and elapsed_s else 0
    timing = "%s<%s, %5.2fit/s" % (clock(elapsed_s), clock((total - done) / rate), rate) if rate else "00:00<?, ?it/s"
    filled = 10 * done // total
    picture = "\u2588" * filled + " " * (10 - filled)
    end = "\n" if done == total else ""
    _write(2, "\r%s: %3d%%|%s| %d/%d [%s]%s" % (label, 100 * done // total, picture, done, total, timing, end))


def kill_itself_when_parent_died(parent):
    """Ask the kernel for SIGKILL when the parent's thread ends (Linux; elsewhere the closed channel ends a rank)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def show_title():
    """Name the process as its command line begins: what `top` and `ps -o comm` show (Linux)."""
    try:
        with open("/proc/self/cmdline", "rb") as source:
            title = source.read().split(b"\0")[0]
        ctypes.CDLL(None).prctl(15, title[:15], 0, 0, 0)  # PR_SET_NAME
    except (AttributeError, OSError):
        pass


def no_core_file():
    """Deaths by signal are part of the show; core files are not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
