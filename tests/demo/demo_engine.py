"""A running stand-in engine, watched as a deploy tool would: its output, its port, its processes, its end."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEADLINE_S = 20.0
MARK = "STANDIN_TEST"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    """`python -m sglang.launch_server` with a port of its own, as a context manager."""

    def __init__(self, python: Path, *options: str, load_s: float = 0.2, port: int | None = None, **environment: str):
        self.port = port or free_port()
        self.mark = uuid.uuid4().hex
        argv = [str(python), "-m", "sglang.launch_server", "--model-path", "/models/m", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*argv, "--standin-load", str(load_s), *options],
            env={**os.environ, **environment, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self._output = b""
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in {*self.ranks(), self.process.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self._reader.join(DEADLINE_S)
        self.process.stdout.close()

    def _read(self) -> None:
        while chunk := self.process.stdout.read(65536):
            with self._arrived:
                self._output += chunk
                self._arrived.notify_all()

    @property
    def log(self) -> str:
        with self._arrived:
            return self._output.decode()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in the output."""
        with self._arrived:
            found = self._arrived.wait_for(lambda: re.search(pattern, self._output.decode()), DEADLINE_S)
        assert found, f"{pattern!r} did not come; the log is:\n{self.log}"
        return found

    def wait_ready(self) -> "Engine":
        self.wait_for("The server is fired up and ready to roll!")
        return self

    def wait_end(self) -> int:
        """The exit status, as subprocess tells it; after that the log is complete."""
        status = self.process.wait(DEADLINE_S)
        until(lambda: not self.ranks())
        self._reader.join(DEADLINE_S)
        return status

    def ranks(self) -> dict[int, str]:
        """pid → title of the scheduler processes of this engine, wherever they hang now."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
        # A zombie has no command line.
        return {pid: title for pid, title in found.items() if title}

    def request(self, path: str, body: object = None, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Status and text of one request on its own connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, sent)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def generate(self, text: object, tokens: int = 8, timeout_s: float = DEADLINE_S) -> object:
        """The answer's `text`, or the list of them."""
        body = {"text": text, "sampling_params": {"max_new_tokens": tokens}}
        status, answer = self.request("/generate", body, timeout_s)
        assert status == 200, answer
        value = json.loads(answer)
        return [item["text"] for item in value] if isinstance(value, list) else value["text"]

    def burst(self, count: int, tokens: int = 40, timeout_s: float = DEADLINE_S) -> list[object]:
        """So many requests at once; for each its text or the exception."""
        gate = threading.Barrier(count)

        def one(number: int) -> object:
            gate.wait(DEADLINE_S)
            try:
                return self.generate(f"prompt {number}", tokens, timeout_s)
            except (OSError, http.client.HTTPException) as error:
                return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))


def until(condition, deadline_s: float = DEADLINE_S) -> None:
    """Wait until a condition of the operating system holds that has no event to wait for."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
