"""One run: its deadline, deployctl with a hosts.yaml of its own, and results that are written as they come."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import arms
from .verdicts import Verdict

PROJECT = Path(__file__).resolve().parents[2]
HOST = "gpu"
REHEARSAL_VOCABULARY = 259  # of the tiny model of the engine's tests
_COMMAND_S = 600.0


class Clock:
    """Seconds to the deadline of the run.

    Args:
        deadline_s: From now.
        reserve_s: Kept for stopping the servers and putting the engine back.
    """

    def __init__(self, deadline_s: float, reserve_s: float) -> None:
        self._began = time.monotonic()
        self.deadline_s, self.reserve_s = deadline_s, reserve_s

    def elapsed_s(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """What may still be spent on measuring."""
        return self.deadline_s - self.reserve_s - self.elapsed_s()

    def really_left_s(self) -> float:
        """The same with the reserve."""
        return self.deadline_s - self.elapsed_s()


class Session:
    """What all stages share.

    Args:
        out: For results.json, transcript.txt and what else is kept.
        work: For hosts.yaml, state, logs of the servers; not kept.
        models: Where the models lie.
        options: Of the command line: attention_backend, layers, quick, rehearse.
        clock: The deadline.
    """

    def __init__(self, out: Path, work: Path, models: Path, options: Any, clock: Clock) -> None:
        self.out, self.work, self.models, self.options, self.clock = out, work, models, options, clock
        self.results: dict[str, Any] = {"stages": {}, "verdicts": [], "errors": [], "skipped": [], "timeline": []}
        self.vocabulary = REHEARSAL_VOCABULARY if options.rehearse else arms.VOCABULARY
        self.outputs: dict[Any, Any] = {}  # what one stage needs of another and nobody wants to read
        self._transcript = out / "transcript.txt"
        self._guard = threading.RLock()
        out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self._write_hosts()
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("DEPLOYCTL_")}
        self._environment.update(
            DEPLOYCTL_CONFIG=str(work / "hosts.yaml"),
            DEPLOYCTL_OPERATOR="test-gpu@localhost",
            NO_COLOR="1",
        )

    def _write_hosts(self) -> None:
        hosts = {
            "defaults": {
                "python": sys.executable,
                "state_dir": str(self.work / "state"),
                "log_dir": str(self.work / "logs"),
                # Servers that hold a GPU end slowly in order, and nobody waits for their answers any more.
                "limits": {"term_grace": "2s", "burst": "60s"},
            },
            "hosts": {HOST: {"connection": "local"}},
            "groups": {"default": [HOST]},
            "profiles": arms.profiles(
                str(self.models),
                self.options.attention_backend,
                rehearsal=bool(self.options.rehearse),
                first_port=free_ports(),
            ),
        }
        (self.work / "hosts.yaml").write_text(json.dumps(hosts, indent=1))  # JSON is YAML
        shutil.rmtree(self.work / "patches", ignore_errors=True)
        shutil.copytree(PROJECT / "patches", self.work / "patches", ignore=shutil.ignore_patterns("__pycache__"))

    def say(self, *words: Any) -> None:
        """A line of progress, kept in the timeline as well."""
        line = " ".join(str(word) for word in words)
        print(f"[{self.clock.elapsed_s():5.0f} s] {line}", flush=True)
        with self._guard:
            self.results["timeline"].append([round(self.clock.elapsed_s(), 1), line])

    def deployctl(self, *words: str, timeout_s: float = _COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Type a command; it and its answer go to the transcript."""
        began = self.clock.elapsed_s()
        command = [sys.executable, "-m", "deployctl", *words]
        try:
            done = subprocess.run(
                command,
                cwd=PROJECT,  # so that it is this deployctl, and the servers' PYTHONPATH stays what it is
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(5.0, timeout_s),
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            done = subprocess.CompletedProcess(command, 124, _text(late.stdout), _text(late.stderr) + "\n(timed out)")
        took = self.clock.elapsed_s() - began
        with self._guard, self._transcript.open("a", encoding="utf-8") as out:
            out.write(f"$ deployctl {' '.join(words)}\n{done.stderr}{done.stdout}")
            out.write(f"(exit {done.returncode}, {took:.1f} s, at {began:.0f} s)\n\n")
        return done

    def ask(self, *words: str, timeout_s: float = _COMMAND_S) -> dict[str, Any]:
        """Type a command with --json: the host's object and `exit_code`; `problem` where the answer is no JSON."""
        at = words.index("--") if "--" in words else len(words)
        done = self.deployctl(*words[:at], "--json", *words[at:], timeout_s=timeout_s)
        try:
            answer = json.loads(done.stdout)
            fields = answer["hosts"][HOST]
        except (ValueError, LookupError, TypeError):
            fields = {"problem": (done.stderr or done.stdout)[-2000:]}
        return {**fields, "exit_code": done.returncode}

    def record(self, stage: str, key: str, value: Any) -> None:
        """Keep a result, on disk at once."""
        with self._guard:
            self.results["stages"].setdefault(stage, {})[key] = value
            self.save()

    def verdicts(self, found: Iterable[Verdict]) -> None:
        """Keep verdicts, and say them."""
        for verdict in found:
            with self._guard:
                self.results["verdicts"].append(verdict.as_json())
            self.say(
                f"{verdict.outcome:7s} {verdict.stage}: {verdict.what}: {verdict.value} {verdict.wanted}", verdict.note
            )
        self.save()

    def skip(self, what: str, why: str) -> None:
        """Keep that something was not run."""
        with self._guard:
            self.results["skipped"].append({"what": what, "why": why})
        self.say(f"not run: {what}: {why}")

    def error(self, where: str, error: BaseException) -> None:
        """Keep a fault of one part; the others go on."""
        trace = "".join(traceback.format_exception(error))[-4000:]
        with self._guard:
            self.results["errors"].append({"where": where, "error": repr(error)[:500], "traceback": trace})
        self.say(f"ERROR {where}: {error!r}"[:600])
        print(trace, flush=True)
        self.save()

    def save(self) -> None:
        """Write results.json anew."""
        with self._guard:
            text = json.dumps({**self.results, "elapsed_s": round(self.clock.elapsed_s(), 1)}, indent=1, default=str)
            temporary = self.out / "results.json.new"
            temporary.write_text(text)
            temporary.replace(self.out / "results.json")


def free_ports() -> int:
    """The first of a row of ports that are free now, one block an arm.

    Raises:
        RuntimeError: There is no such row.
    """
    count = len(arms.all_arms()) * arms.PORTS_OF_AN_ARM
    for first in range(arms.FIRST_PORT, arms.LAST_PORT - count, count):
        if all(_is_free(port) for port in range(first, first + count, arms.PORTS_OF_AN_ARM // 2)):
            return first
    raise RuntimeError(f"no {count} free ports between {arms.FIRST_PORT} and {arms.LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def machine() -> Mapping[str, Any]:
    """What this runs on."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count()}
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        found["gpus"] = done.stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["gpus"] = [repr(error)]
    from importlib import metadata

    for name in ("torch", "sglang", "transformers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _text(output: str | bytes | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""
