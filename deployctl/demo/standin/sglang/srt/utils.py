"""Log lines, titles, tensors that know nothing but their shape."""

import ctypes
import os
import signal
import sys
import time


def log(text, rank=None):
    """One line with SGLang's prefix."""
    mark = "" if rank is None else " TP%d" % rank
    sys.stdout.write("[%s%s] %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), mark, text))
    sys.stdout.flush()


def progress(label, done, total):
    """One state of a tqdm bar on stderr."""
    percent = 100 * done // total
    sys.stderr.write("\r%s: %3d%% Completed | %d/%d [00:00<00:00,  2.32it/s]" % (label, percent, done, total))
    if done == total:
        sys.stderr.write("\n")
    sys.stderr.flush()


def die_with_parent():
    """SIGKILL when the parent thread goes, as the engine's children ask for (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        pass


def children():
    """Pids of our own children (Linux; elsewhere those we remember)."""
    found = []
    try:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with open("/proc/%s/stat" % name, "rb") as source:
                    text = source.read()
                if int(text[text.rindex(b")") + 2 :].split()[1]) == os.getpid():
                    found.append(int(name))
    except (OSError, ValueError):
        pass
    return found


class Tensor:
    """A vector of numbers; copying checks sizes as torch does."""

    def __init__(self, values):
        self.values = list(values)

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return Tensor(self.values[key])
        return self.values[key]

    @property
    def shape(self):
        return (len(self.values),)

    def copy_(self, other):
        if len(other) not in (1, len(self)):
            raise RuntimeError(
                "The size of tensor a (%d) must match the size of tensor b (%d) at non-singleton dimension 0"
                % (len(self), len(other))
            )
        self.values[:] = other.values if len(other) == len(self) else other.values * len(self)
        return self
