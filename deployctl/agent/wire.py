"""The agent's end of the exchange: events, data and one verdict out; control lines and blobs in.

Every line out is `@NONCE {json}`: whatever login scripts or background jobs print in between does not begin so and
is taken for noise. A `data` event is followed by exactly `bytes` raw bytes. Writing never raises: when the client
has gone, `cancelled` is set and the agent goes on to finish or undo what it has begun.
"""

import json
import threading
import time

# The client sends a line at least every 10 s; past this silence it counts as gone.
CLIENT_SILENCE_S = 45.0
HEARTBEAT_S = 10.0
# A signal sets `cancelled` without waking anybody: its handler must not take locks.
_SIGNAL_S = 0.5


class Wire:
    """Thread-safe event stream of one command.

    Args:
        stdin: Binary stream, positioned after the request.
        stdout: Binary stream to the client.
        nonce: The word that marks our lines.
        blobs: `[[name, size], ...]` that follow the request on stdin.
        watch: Whether to read control lines in the background (False for in-process tests).
    """

    def __init__(self, stdin, stdout, nonce, blobs=(), watch=True):
        self._stdin = stdin
        self._stdout = stdout
        self._prefix = ("@" + nonce + " ").encode("ascii")
        self._lock = threading.Lock()
        self._controls = []
        self._wakeup = threading.Condition()
        self._last_heard = time.monotonic()
        self._sent_at = time.monotonic()
        self.cancelled = threading.Event()
        self.gone = threading.Event()
        self.blobs = {}
        for name, size in blobs:
            content = stdin.read(size)
            if len(content) != size:
                self.gone.set()
                self.cancelled.set()
            self.blobs[name] = content
        if watch:
            for target in (self._read_controls, self._beat):
                threading.Thread(target=target, daemon=True).start()

    # -- out ---------------------------------------------------------------------------------------------------------

    def event(self, kind, /, **fields):
        """Send one event; `fields` are JSON values (text may hold surrogate escapes)."""
        fields["event"] = kind
        self._write(self._prefix + json.dumps(fields).encode("ascii") + b"\n")

    def data(self, payload):
        """Send raw bytes (log content)."""
        head = self._prefix + json.dumps({"event": "data", "bytes": len(payload)}).encode("ascii") + b"\n"
        self._write(head + payload)

    def verdict(self, result):
        """Send the last line: the host's result."""
        self.event("verdict", result=result)

    def _write(self, payload):
        with self._lock:
            if self.gone.is_set():
                return
            try:
                self._stdout.write(payload)
                self._stdout.flush()
                self._sent_at = time.monotonic()
            except (OSError, ValueError):
                self._lost()

    # -- in ----------------------------------------------------------------------------------------------------------

    def _lost(self):
        self.gone.set()
        self.cancelled.set()
        with self._wakeup:
            self._wakeup.notify_all()

    def _read_controls(self):
        try:
            for line in iter(self._stdin.readline, b""):
                self._last_heard = time.monotonic()
                try:
                    control = json.loads(line.decode("utf-8"))
                except ValueError:
                    continue  # a torn line of a dying link
                if not isinstance(control, dict):
                    continue  # likewise: the rest of one may be JSON by itself
                word = control.get("control")
                if word == "alive":
                    continue
                if word == "cancel":
                    self.cancelled.set()
                with self._wakeup:
                    self._controls.append(control)
                    self._wakeup.notify_all()
        except (OSError, ValueError):
            pass  # the link is gone; the line below says so
        self._lost()

    def _beat(self):
        while not self.gone.wait(1.0):
            now = time.monotonic()
            if now - self._sent_at >= HEARTBEAT_S:
                self.event("alive")
            if now - self._last_heard > CLIENT_SILENCE_S:
                self._lost()

    def await_control(self, words, deadline_s):
        """Wait for one of `words` from the client.

        Returns:
            The control object, or None when the client is gone, cancelled, or `deadline_s` seconds have passed.
        """
        end = time.monotonic() + deadline_s
        with self._wakeup:
            while True:
                for control in self._controls:
                    if control.get("control") in words:
                        self._controls.remove(control)
                        return control
                left = end - time.monotonic()
                if self.cancelled.is_set() or left <= 0:
                    return None
                self._wakeup.wait(min(left, _SIGNAL_S))
