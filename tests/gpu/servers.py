"""Servers that deployctl launched. All start together; those that are not being measured stand still (SIGSTOP)."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .arms import Arm
from .decode_log import Log, leak_lines, ready_line
from .session import Session
from .verdicts import judge

LOG_TAG = "gpu"
BURST = "10"
_AFTER_CONTINUE_S = 0.3
_LOGS_SHOWN = 2  # in the transcript
_DEAD = "ZX"  # ended, and not yet or just now reaped
_LOG_TAIL_BYTES = 80_000


def processes_of_session(leader: int) -> list[int]:
    """The pids that live in the session that a process leads, read from /proc."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue  # it has just ended
        state, _, _, session = fields[fields.rindex(")") + 2 :].split()[:4]
        if int(session) == leader and state not in _DEAD:
            found.append(int(name))
    return found


class Server:
    """One launched arm.

    Args:
        arm: What it is.
        launched: deployctl's answer to the launch.
        vocabulary: Of its model.
    """

    def __init__(self, arm: Arm, launched: dict[str, Any], vocabulary: int) -> None:
        self.arm = arm
        self.vocabulary = vocabulary
        self.attempt: int = launched["attempt"]
        self.pid: int = launched["pid"]
        self.url: str = launched["url"]
        self.log = Log(launched["log"])
        self.ready = False
        self.dead = False

    @property
    def name(self) -> str:
        """The arm's key."""
        return self.arm.key

    def signal(self, number: int) -> None:
        """To its process group, and to what of its session has left the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        for pid in processes_of_session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self) -> None:
        """Let it stand still: it polls for requests otherwise and takes the CPU from the one that is measured."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def alive(self) -> bool:
        """Whether its launcher lives."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return state[state.rindex(")") + 2] not in _DEAD

    @contextlib.contextmanager
    def running(self) -> Iterator["Server"]:
        """For the length of a block it runs, and stands still again whatever happens."""
        self.resume()
        time.sleep(_AFTER_CONTINUE_S)
        try:
            yield self
        finally:
            self.pause()


class Fleet:
    """The servers of a run.

    Args:
        session: The run.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.servers: dict[str, Server] = {}
        self._launched: list[Server] = []

    def start(self, wanted: Sequence[Arm], limit_s: float) -> None:
        """Launch arms, wait until each is ready, smoke it and send a burst; one that fails is told and left out.

        Args:
            wanted: In the order of their importance.
            limit_s: The longest that it may take altogether.
        """
        began = time.monotonic()
        loading = [server for arm in wanted if (server := self._launch(arm)) is not None]
        if not loading:
            return
        self.session.say("loading:", ", ".join(server.name for server in loading))
        with ThreadPoolExecutor(max_workers=len(loading)) as pool:
            for server in loading:
                pool.submit(self._wait, server, max(20.0, limit_s - (time.monotonic() - began)))
        for server in loading:
            if server.ready:
                self.servers[server.name] = server
        self.session.record("servers", "gpu_mib", self._memory())
        self.session.deployctl("status", timeout_s=60)

    def _launch(self, arm: Arm) -> Server | None:
        words = ("launch", "--no-wait", "--no-clean", "--profile", arm.key, "--log-tag", LOG_TAG)
        answer = self.session.ask(*words, timeout_s=60)
        if answer["exit_code"] or not answer.get("pid"):
            self.session.record("servers", arm.key, {"state": "not launched", "answer": answer})
            self.session.say(f"{arm.key}: not launched: {answer.get('error') or answer.get('problem')}")
            return None
        server = Server(arm, answer, self.session.vocabulary)
        self._launched.append(server)
        return server

    def _wait(self, server: Server, limit_s: float) -> None:
        """Follow one load to ready and through its burst; then it stands still."""
        try:
            words = ("wait", "--attempt", str(server.attempt), "--burst", BURST, "--timeout", f"{int(limit_s)}s")
            answer = self.session.ask(*words, timeout_s=limit_s + 45)
            # A server whose smoke or burst was wrong is left running by deployctl, and worth measuring.
            server.ready = answer.get("state") in ("ready", "smoke_failed")
            kept = {key: answer.get(key) for key in ("state", "ready_seconds", "phases", "smoke", "error", "problem")}
            kept["dynspec"] = ready_line(server.log.since())
            self.session.record("servers", server.name, kept)
            if server.ready:
                server.pause()
                self.session.say(f"{server.name}: {answer['state']} after {answer.get('ready_seconds')} s")
            well = answer["exit_code"] == 0
            what = f"{server.name}: ready, and well after a smoke and a burst of {BURST}"
            problem = (answer.get("error") or {}).get("message") or answer.get("problem")
            self.session.verdicts(
                [judge("deployctl", what, answer.get("state"), holds=well, note=str(problem or "")[:200])]
            )
            if server.ready:
                return
            self.session.say(f"{server.name}: {answer.get('state')}: {answer.get('error') or answer.get('problem')}")
            self.session.deployctl("logs", "--crash", "--attempt", str(server.attempt), timeout_s=60)
            print(server.log.tail(2500), flush=True)
            server.resume()
            self.session.deployctl("stop", "--attempt", str(server.attempt), timeout_s=120)
        except Exception as error:
            self.session.error(f"waiting for {server.name}", error)

    def _memory(self) -> dict[str, int]:
        """MiB of GPU memory of each server, where nvidia-smi tells."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        found: dict[str, int] = {}
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            for line in done.stdout.splitlines():
                pid, used = (int(word) for word in line.split(","))
                for server in self.servers.values():
                    if os.getsid(pid) == server.pid:
                        found[server.name] = found.get(server.name, 0) + used
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.session.say(f"nvidia-smi: {error!r}")
        return found

    def get(self, key: str) -> Server | None:
        """A server that runs, or None."""
        return self.servers.get(key)

    def look_after(self, server: Server) -> None:
        """After a fault: if the server died of it, deployctl says why; it is left out from then on."""
        if server.alive():
            return
        server.dead = True
        self.servers.pop(server.name, None)
        self.session.ask("wait", "--attempt", str(server.attempt), "--no-smoke", "--timeout", "10s", timeout_s=60)
        self.session.deployctl("logs", "--crash", "--attempt", str(server.attempt), timeout_s=60)

    def check(self) -> dict[str, Any]:
        """Of every server: whether it lives, and what its log complains of."""
        return {
            name: {"alive": server.alive(), "leaks": leak_lines(server.log.since())[:5]}
            for name, server in self.servers.items()
        }

    def stop(self) -> bool:
        """End all, verified by deployctl; their logs' ends are kept. Whether deployctl says that nothing runs."""
        logs = self.session.out / "logs"
        logs.mkdir(exist_ok=True)
        for path in sorted((self.session.work / "logs").glob("*.log")):
            (logs / path.name).write_text(Log(str(path)).tail(_LOG_TAIL_BYTES))
        for server in [server for server in self.servers.values() if server.arm.dynamic][:_LOGS_SHOWN]:
            words = ("logs", "--attempt", str(server.attempt), "--grep", r"\[dynspec\]", "-n", "20")
            self.session.deployctl(*words, timeout_s=30)
        for server in self._launched:
            server.resume()
        answer = self.session.ask("stop", timeout_s=max(60.0, self.session.clock.really_left_s()))
        for server in self._launched:
            if processes_of_session(server.pid):  # deployctl has failed at it, which is told; the GPU is wanted back
                self.session.say(f"{server.name}: still lives after deployctl stop: {answer}")
                server.signal(signal.SIGKILL)
                answer["exit_code"] = answer["exit_code"] or 1
        self.servers.clear()
        self._launched.clear()
        return answer["exit_code"] == 0
