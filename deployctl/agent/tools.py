"""Programs of the host that may be missing, fail or hang: asked with a time limit."""

import os
import re
import selectors
import shutil
import signal
import subprocess
import time

# A host with eight GPUs and no nvidia-persistenced takes this long to answer at times.
TOOL_S = 30.0
# nvidia-smi of a host with hundreds of clients prints some ten thousand bytes.
_MOST_BYTES = 1 << 20


class Tool:
    """Runs a program with a time limit; `problem` says why its answer is missing.

    Args:
        argv: The program and its arguments.
        limit_s: How long it may take, in seconds.
    """

    def __init__(self, argv, limit_s=TOOL_S):
        self.problem = None
        self.stdout = b""
        self.stderr = b""
        if shutil.which(argv[0]) is None:
            self.problem = "%s is not installed" % argv[0]
            return
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            self.problem = "%s cannot be run: %s" % (argv[0], error.strerror)
            return
        self.problem = self._read(process, argv[0], limit_s)
        if self.problem is not None:
            _cut_off(process)
            return
        # fuser says by 1 that nobody holds the files, and complains of processes that it may not look at.
        nobody = argv[0] == "fuser" and process.returncode == 1 and not re.search(rb"(?m)^(?!Cannot ).", self.stderr)
        if process.returncode != 0 and not nobody:
            text = (self.stderr or self.stdout).decode("utf-8", "replace").strip().splitlines()
            self.problem = "%s failed (exit status %d): %s" % (argv[0], process.returncode, text[-1] if text else "")

    def _read(self, process, name, limit_s):
        """Take its output to the end; what is wrong with it, or None."""
        finish = time.monotonic() + limit_s
        taken = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for stream in taken:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, finish - time.monotonic())):
                    block = os.read(key.fd, 65536)
                    taken[key.fileobj] += block
                    if not block:
                        selector.unregister(key.fileobj)
                if time.monotonic() > finish:
                    return "%s gave no answer within %g s" % (name, limit_s)
                if any(len(content) > _MOST_BYTES for content in taken.values()):
                    return "%s printed more than %d bytes" % (name, _MOST_BYTES)
        try:
            process.wait(max(0.0, finish - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "%s gave no answer within %g s" % (name, limit_s)
        self.stdout, self.stderr = bytes(taken[process.stdout]), bytes(taken[process.stderr])
        for stream in taken:
            stream.close()
        return None


def _cut_off(process):
    """End a tool with all that it started; one that is stuck in the driver may not die, and is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it ended at this very moment
    for stream in (process.stdout, process.stderr):
        stream.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # as good as: nobody asks it again
