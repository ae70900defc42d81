"""Runs the real engine through its typical lives and keeps the logs in captured/. Standard library only.

    <engine venv>/bin/python capture.py [SCENARIO ...]

The parsers of phases and crashes are tested on these logs, so they must be what the engine prints and not what somebody
remembers. Paths of this machine are replaced by the ones a server would have; nothing else is changed. Each scenario
prints what it measured as one JSON line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CAPTURED = HERE / "captured"
SITE = Path(sysconfig.get_paths()["purelib"])
READY_LINE = "The server is fired up and ready to roll!"
DEADLINE_S = 180
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ARGUMENTS = [
    *("--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--grammar-backend", "none"),
]
CLIENT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# A patch with a slip that only a batch of ten or more reaches: an attribute that was never set.
RUN_BATCH = '        """Run a batch."""\n        self.forward_ct += 1\n'
BROKEN_RUN_BATCH = RUN_BATCH + ("        if batch.batch_size() >= 10:\n            self.spec_disabled_batches += 1\n")


class Server:
    """One server process in a session of its own, with its log and the time it took to become ready."""

    def __init__(self, model: Path, folder: Path, extra: list[str] | None = None, port: int | None = None) -> None:
        self.port = port or free_port()
        self.log = folder / "server.log"
        self.begun = time.monotonic()
        overlay = folder / "overlay"
        environment = {**os.environ, **ENVIRONMENT, **({"PYTHONPATH": str(overlay)} if overlay.exists() else {})}
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *ARGUMENTS, *(extra or [])],
                cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        """The log so far."""
        return self.log.read_bytes().decode(errors="replace")

    def wait_for(self, what: str, condition: Callable[[], bool]) -> float:
        """Seconds from the start until the condition holds; SystemExit with the log's end past the deadline."""
        while not condition():
            if time.monotonic() - self.begun > DEADLINE_S:
                sys.exit(f"no {what} after {DEADLINE_S} s:\n{self.text()[-3000:]}")
            time.sleep(0.02)
        return round(time.monotonic() - self.begun, 2)

    def ready(self) -> float:
        """Seconds until the ready line stands in the log and /health answers 200."""

        def both() -> bool:
            if self.process.poll() is not None:
                sys.exit(f"the server ended with {self.process.returncode}:\n{self.text()[-3000:]}")
            return READY_LINE in self.text() and self.health() == 200

        return self.wait_for("ready server", both)

    def health(self) -> int:
        """The status of /health, 0 when nothing answers."""
        try:
            with CLIENT.open(f"http://127.0.0.1:{self.port}/health", timeout=25) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def generate(self, prompt: str) -> str:
        """Sixteen greedy tokens, or the error's name."""
        sampling = {"max_new_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            data=json.dumps({"text": prompt, "sampling_params": sampling}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with CLIENT.open(request, timeout=60) as answer:
                return str(json.load(answer)["text"])
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    def burst(self, count: int) -> list[str]:
        """The same number of answers at once."""
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(self.generate, [f"question {number}" for number in range(count)]))

    def members(self) -> dict[int, tuple[str, int]]:
        """By pid: (title, resident MB) of the server's session, zombies left out."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(folder.name)] = (title, int((folder / "statm").read_text().split()[1]) * 4096 // 10**6)
        return found

    def scheduler(self) -> int:
        """The scheduler's pid."""
        return next(pid for pid, (title, _) in self.members().items() if title.startswith("sglang::scheduler"))

    def end(self) -> None:
        """Ends whatever is left of the session and reaps the launcher."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def after(self, begun: float) -> float:
        """Seconds from `begun` until nothing of the session lives."""
        self.wait_for("end of all processes", lambda: self.process.poll() is not None and not self.members())
        return round(time.monotonic() - begun, 2)


def free_port() -> int:
    """A port that was free a moment ago, below 55536: the engine also derives a gRPC port, 10000 higher."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= 65535 - 10000:
            return port


def overlay(folder: Path, file: str, old: str, new: str) -> None:
    """A copy of the engine's tree in front of the installed one, with one text replaced in one file."""
    shutil.copytree(SITE / "sglang", folder / "overlay" / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "overlay" / "sglang" / file
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{file} holds the text to replace {text.count(old)} times, expected once")
    path.write_text(text.replace(old, new))


@contextlib.contextmanager
def serving(model: Path, folder: Path, extra: list[str] | None = None, port: int | None = None) -> Iterator[Server]:
    """A server that does not outlive the block."""
    server = Server(model, folder, extra, port)
    try:
        yield server
    finally:
        server.end()


def normal(model: Path, folder: Path) -> dict[str, object]:
    """Load to ready, one answer, sixteen at once, SIGTERM."""
    with serving(model, folder) as server:
        seconds = server.ready()
        until_ready = server.text()
        answer = server.generate("hello")
        answers = server.burst(16)
        members = sorted(server.members().values())
        begun = time.monotonic()
        server.process.terminate()
        gone = server.after(begun)
        (folder / "normal.log").write_bytes(until_ready.encode())
        (folder / "sigterm.log").write_bytes(server.text().encode())
        return {
            "ready_s": seconds, "answer": answer, "answers": answers, "processes": [list(item) for item in members],
            "sigterm_to_gone_s": gone, "exit": server.process.returncode,
        }  # fmt: skip


def run_time_crash(model: Path, folder: Path) -> dict[str, object]:
    """An exception in the scheduler's loop once a batch has ten requests; one request goes well."""
    overlay(folder, "srt/managers/scheduler.py", RUN_BATCH, BROKEN_RUN_BATCH)
    with serving(model, folder) as server:
        seconds = server.ready()
        answer = server.generate("hello")
        begun = time.monotonic()
        answers = server.burst(10)
        gone = server.after(begun)
        return {"ready_s": seconds, "answer": answer, "answers": answers, "burst_to_gone_s": gone,
                "exit": server.process.returncode}  # fmt: skip


def ends_by_itself(
    model: Path, folder: Path, extra: list[str] | None = None, port: int | None = None
) -> dict[str, object]:
    """A start that fails: when and how it ends."""
    with serving(model, folder, extra, port) as server:
        server.after(server.begun)
        return {"seconds": round(time.monotonic() - server.begun, 2), "exit": server.process.returncode}


def load_crash(model: Path, folder: Path) -> dict[str, object]:
    """An exception while the scheduler is set up: a library that is not installed."""
    return ends_by_itself(model, folder, ["--grammar-backend", "xgrammar"])


def import_crash(model: Path, folder: Path) -> dict[str, object]:
    """A patched file that does not import: a name that was never defined."""
    marker = "logger = logging.getLogger(__name__)\n"
    overlay(folder, "srt/managers/scheduler.py", marker, marker + "SPEC_LIMIT = speculative_batch_limit * 2\n")
    return ends_by_itself(model, folder)


def argument_error(model: Path, folder: Path) -> dict[str, object]:
    """A flag that this version does not know."""
    return ends_by_itself(model, folder, ["--speculative-disable-batch-threshold", "8"])


def speculative_on_cpu(model: Path, folder: Path) -> dict[str, object]:
    """Speculative decoding, whose pools need Triton and so a GPU: a crash while the KV cache is set up."""
    return ends_by_itself(model, folder, ["--speculative-algorithm", "EAGLE3"])


def model_missing(model: Path, folder: Path) -> dict[str, object]:
    """A model path that does not exist."""
    return ends_by_itself(model.with_name("no-such-model"), folder)


def stuck_on_port(model: Path, folder: Path, port: int) -> dict[str, object]:
    """A start on a port that is taken: what is still alive half a minute after the engine noticed."""
    with serving(model, folder, port=port) as server:
        server.wait_for("bind error", lambda: "address already in use" in server.text())
        noticed = time.monotonic()
        while server.members() and time.monotonic() < noticed + 30:
            time.sleep(0.1)
        return {
            "noticed_s": round(noticed - server.begun, 2),
            "watched_s": round(time.monotonic() - noticed, 2),
            "alive": [title[:60] for title, _ in server.members().values()],
            "exit": server.process.poll(),
            "says_ready": READY_LINE in server.text(),
        }


def port_in_use(model: Path, folder: Path) -> dict[str, object]:
    """Another program listens on the port; the engine notices after the whole load."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        return stuck_on_port(model, folder, port)


def port_in_use_by_twin(model: Path, folder: Path) -> dict[str, object]:
    """Another server of the same kind holds the port, and answers the newcomer's warm-up."""
    (folder / "twin").mkdir()
    with serving(model, folder / "twin") as twin:
        twin.ready()
        return stuck_on_port(model, folder, twin.port)


def port_too_high(model: Path, folder: Path) -> dict[str, object]:
    """A port from which no gRPC port can be derived: the engine refuses it at once."""
    return ends_by_itself(model, folder, port=60123)


def scheduler_killed(model: Path, folder: Path) -> dict[str, object]:
    """SIGKILL for the scheduler of an idle server, as the kernel's memory killer does."""
    with serving(model, folder) as server:
        server.ready()
        begun = time.monotonic()
        os.kill(server.scheduler(), signal.SIGKILL)
        return {"kill_to_gone_s": server.after(begun), "exit": server.process.returncode}


def launcher_killed(model: Path, folder: Path) -> dict[str, object]:
    """SIGKILL for the launcher of an idle server: how long its children outlive it."""
    with serving(model, folder) as server:
        server.ready()
        before = server.members()
        begun = time.monotonic()
        server.process.kill()
        left: dict[str, float] = {}
        deadline = begun + 60
        while time.monotonic() < deadline:
            alive = server.members()
            for pid, (title, _) in before.items():
                if pid not in alive:
                    left.setdefault(f"{title[:60]}", round(time.monotonic() - begun, 3))
            if not alive:
                break
            time.sleep(0.005)
        return {"seconds_after_kill": left, "survivors": [title for title, _ in server.members().values()]}


def launcher_killed_in_load(model: Path, folder: Path) -> dict[str, object]:
    """SIGKILL for the launcher while the children still import: before they asked to die with it."""
    with serving(model, folder) as server:
        server.wait_for("children", lambda: len(server.members()) >= 4)
        begun = time.monotonic()
        server.process.kill()
        survivors = [title[:60] for title, _ in server.members().values()]
        deadline = begun + 60
        while server.members() and time.monotonic() < deadline:
            time.sleep(0.02)
        return {"alive_after_kill": survivors, "all_gone_s": round(time.monotonic() - begun, 2),
                "survivors": [title[:60] for title, _ in server.members().values()]}  # fmt: skip


SCENARIOS: dict[str, Callable[[Path, Path], dict[str, object]]] = {
    function.__name__: function
    for function in (
        normal, run_time_crash, load_crash, import_crash, argument_error, speculative_on_cpu, model_missing,
        port_in_use, port_in_use_by_twin, port_too_high, scheduler_killed, launcher_killed, launcher_killed_in_load,
    )
}  # fmt: skip


def anonymous(text: str, folder: Path, model: Path) -> str:
    """The log with the paths that a server would have."""
    for path, public in (
        (folder / "overlay", "/opt/ml-env/lib/python3.11/site-packages"),
        (SITE, "/opt/ml-env/lib/python3.11/site-packages"),
        (Path(sys.prefix), "/opt/ml-env"),
        (Path(sys.base_prefix), "/usr"),
        (model.parent, "/models"),
    ):
        text = text.replace(str(path), public)
    return text


def main() -> None:
    """Command line: runs the named scenarios, all by default, one after another."""
    parser = argparse.ArgumentParser(description="Capture real logs of the engine.")
    parser.add_argument(
        "scenario",
        nargs="*",
    )
    names = parser.parse_args().scenario or list(SCENARIOS)
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    CAPTURED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as top:
        model = Path(top) / "models" / "tiny-llama"
        subprocess.run([sys.executable, HERE / "make_model.py", model], check=True, stdout=subprocess.DEVNULL)
        for name in names:
            folder = Path(top) / name
            folder.mkdir()
            print(json.dumps({"scenario": name, **SCENARIOS[name](model, folder)}), flush=True)
            logs = sorted(path for path in folder.glob("*.log") if path.name != "server.log")
            for source in logs or [folder / "server.log"]:
                target = CAPTURED / (source.name if logs else f"{name.replace('_', '-')}.log")
                target.write_bytes(anonymous(source.read_bytes().decode(), folder, model).encode())


if __name__ == "__main__":
    main()
