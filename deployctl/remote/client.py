"""One operation on one host: sends the request in a single exchange and yields the agent's events.

A verdict is a value, also when it says that a step failed; only "could not ask" is an exception.
"""

import json
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from deployctl.errors import DeployError, LinkLost, Unreachable
from deployctl.remote import bundle
from deployctl.transport.base import Channel, Completed, Transport

PROTOCOL = 1
# The agent says something at least every 10 s; a host that is silent for longer than this is taken for dead.
DEAD_PEER_S = 45.0
HEARTBEAT_S = 10.0
_NOISE_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one host is asked to do.

    Args:
        operation: A name of the agent's table.
        host: The resolved host as JSON: name, package, state_dir, log_dir, gpu, limits.
        args: The operation's own arguments.
        blobs: Contents that travel beside the request (patch scripts, files to copy).
        run_id, operator, command: One id for all hosts of a command; who asks; the command in words.
    """

    operation: str
    python: str
    host: Mapping[str, Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    run_id: str = ""
    operator: str = ""
    command: str = ""


def encode(request: Request, nonce: str) -> bytes:
    """The bytes of a request: bootstrap, header, modules, request, blobs."""
    bootstrap = bundle.source_of("bootstrap").encode()
    modules = bundle.bundle_for(request.operation)
    body = zlib.compress(
        json.dumps(
            {
                "op": request.operation,
                "host": request.host,
                "args": request.args,
                "run_id": request.run_id,
                "operator": request.operator,
                "command": request.command,
            }
        ).encode(),
        6,
    )
    header = {
        "protocol": PROTOCOL,
        "nonce": nonce,
        "bundle": len(modules),
        "request": len(body),
        "blobs": [[name, len(content)] for name, content in request.blobs.items()],
    }
    head = json.dumps(header).encode() + b"\n"
    return b"".join([b"%d\n" % len(bootstrap), bootstrap, head, modules, body, *request.blobs.values()])


class Exchange:
    """A running operation. Iterate over it for its events; the result stands in `result` afterwards.

    Use as a context manager: leaving it lets go of the channel, which the agent takes as "undo or finish".

    Attributes:
        result: The host's result (`status`, `exit`, `error`, ...), or None until the verdict came.
        noise: What the host printed that was not ours (login scripts), at most 4 KiB, decoded.
    """

    def __init__(self, transport: Transport, request: Request, *, dead_peer_s: float = DEAD_PEER_S) -> None:
        self._request = request
        self._dead_peer_s = dead_peer_s
        self._nonce = secrets.token_hex(8)
        self._prefix = f"@{self._nonce} ".encode()
        self._channel: Channel = transport.open([request.python, "-c", bundle.STUB])
        self._buffer = bytearray()
        self._ended = threading.Event()
        self._noise = bytearray()
        self.result: dict[str, Any] | None = None
        self._channel.send(encode(request, self._nonce))
        self._beat = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._beat.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._channel.close()

    @property
    def noise(self) -> str:
        """What the host printed beside our frames, for error messages."""
        return self._noise.decode("utf-8", "replace").strip()

    def control(self, word: str, **fields: object) -> None:
        """Send a control line: `commit`, `abort` or `cancel`."""
        self._channel.send(json.dumps({"control": word, **fields}).encode() + b"\n")

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                self.control("alive")
            except DeployError:
                return  # the reader meets the same broken link and reports it

    def events(self) -> Iterator[dict[str, Any]]:
        """The agent's events in order, without `alive` and the verdict; ends when the verdict has come.

        A `data` event carries its bytes under `payload`.

        Raises:
            LinkLost: The link broke, or the peer was silent for too long, before the verdict.
            Unreachable: The agent never started (kind `no-python` or `no-agent`), with what the host printed.
        """
        started = False
        while (line := self._next_line()) is not None:
            if not line.startswith(self._prefix):
                self._noise += line
                del self._noise[:-_NOISE_KEPT]
                continue
            started = True
            event: dict[str, Any] = json.loads(line[len(self._prefix) :])
            match event["event"]:
                case "alive":
                    continue
                case "verdict":
                    self.result = event["result"]
                    self._ended.set()
                    return
                case "data":
                    event["payload"] = self._exactly(event["bytes"])
            yield event
        self._ended.set()
        completed = self._channel.finish(10.0)
        if started:
            raise LinkLost(
                f"the agent ended without a verdict ({_ending(completed)})",
                hint="run the same command again: it looks at the journal first",
            )
        raise self._not_started(completed)

    def _not_started(self, completed: Completed) -> Unreachable:
        said = (completed.stderr_tail.decode("utf-8", "replace") + "\n" + self.noise).strip()
        last = said.splitlines()[-1] if said else ""
        if completed.status in (126, 127):
            return Unreachable(
                f"no usable python at {self._request.python}: {last or _ending(completed)}",
                hint="set `python:` of this host in hosts.yaml to the interpreter that serves",
                kind="no-python",
            )
        return Unreachable(
            f"the agent did not start ({_ending(completed)}): {last or 'the host printed nothing'}",
            hint="ssh to the host and run the interpreter of hosts.yaml by hand; login scripts may end the session",
            kind="no-agent",
        )

    def _fill(self) -> bool:
        silent_since = time.monotonic()
        while True:
            chunk = self._channel.receive(1.0)
            if chunk is None:
                if time.monotonic() - silent_since > self._dead_peer_s:
                    raise LinkLost(f"no sign of life from the host for {self._dead_peer_s:.0f} s")
                continue
            self._buffer += chunk
            return bool(chunk)

    def _next_line(self) -> bytes | None:
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if not self._fill():
                line = bytes(self._buffer)
                self._buffer.clear()
                return line or None
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        # Text without a newline at its end, printed by a login script, may stand before our frame.
        at = line.find(self._prefix)
        if at > 0:
            self._noise += line[:at] + b"\n"
            line = line[at:]
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._fill():
                raise LinkLost("the link ended in the middle of a block of data")
        payload = bytes(self._buffer[:size])
        del self._buffer[:size]
        return payload


def _ending(completed: Completed) -> str:
    return f"signal {completed.signal}" if completed.signal else f"exit status {completed.status}"
