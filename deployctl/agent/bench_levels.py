"""One level after the other against one server: the prompts made ready, the generator run, its result read."""

import contextlib
import json
import os
import random
import re
import shutil
import time

from . import gpu, health, keeper, loadgen, script, serverinfo
from .failure import Cancelled, Failure
from .state import disk_failure, write_file
from .watcher import Watcher

# A level of the least concurrency is worth so many requests; others so many for each place.
_LEAST_REQUESTS, _ROUNDS = 16, 4
_TIMEOUT_S = 600.0
_FIND_S = 120.0
_RENDER_S = 300.0
_LOG_BYTES = 4 << 20
_TAIL_BYTES = 16 << 10
_EVENT_S = 0.25
_STOP_LOOK_S = 0.5
# A server that took its requests down with it is gone, or shows it, within this.
_DEATH_S = 3.0

# Looks for PACKAGE and its MODULE without importing either, which would take an engine's seconds.
_LOOK = """
import importlib.util, os, sys
package, module = sys.argv[1:3]
spec = importlib.util.find_spec(package)
places = list(spec.submodule_search_locations or ()) if spec else ()
found = [place for place in places if not module or os.path.exists(os.path.join(place, module + ".py"))]
if not found:
    sys.exit("No module named %s" % ".".join(filter(None, (package, module))))
try:
    import importlib.metadata
    print("deployctl-version", importlib.metadata.version(package))
except Exception:
    pass
"""


def requests_of(load, concurrency):
    """How many requests a level sends."""
    return load.get("requests_per_level") or max(_LEAST_REQUESTS, _ROUNDS * concurrency)


class Levels:
    """Measures levels of one load.

    Args:
        context: Of the operation.
        attempt: The attempt that is measured.
        load: {"levels", "max_tokens", "requests_per_level", "seed"}.
        prompts: [[{"role", "content"}]].
        folder: Of the bench.

    Attributes:
        generator: Of the attempt's engine.
        watcher: The attempt's Watcher.
        stopped_by: Who has the server stopped meanwhile, or None.
    """

    def __init__(self, context, attempt, load, prompts, folder):
        self.generator = loadgen.generator_for(attempt["engine"])
        self.watcher = Watcher(context, attempt, from_end=True)
        self.stopped_by = None
        self._context = context
        self._attempt = attempt
        self._load = load
        self._prompts = prompts
        self._folder = folder
        self._timeout_s = context.args.get("timeout_s") or _TIMEOUT_S
        self._began = time.time()
        self._stop_looked_at = 0.0
        base_url = health.base_of(attempt["ready"]["url"])
        headers = health.authorization(attempt["argv"])
        self.settings = serverinfo.settings_of(attempt["engine"], base_url, headers)
        self._target = loadgen.Target(
            python=self._python(),
            base_url=base_url,
            headers=headers,
            model=self.settings["model_path"],
            tokenizer=self.settings["tokenizer_path"] or self.settings["model_path"],
            environment=keeper.environment_of(attempt, os.environ),
            cwd=attempt["cwd"] if os.path.isdir(attempt["cwd"]) else "/",
            folder=folder,
        )

    def prepare(self):
        """Find the generator and make the prompts ready.

        Returns:
            (version of the generator or None, [warning]).

        Raises:
            Failure: There is no generator, or no space.
        """
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise disk_failure(error, self._folder) from error
        tools: dict = {}
        self.settings["gpus"] = [card["name"] for card in gpu.cards(self._context, tools)]
        version = self._find_generator()
        warnings = []
        most = self.settings["max_running_requests"]
        if most is not None and most < max(self._load["levels"]):
            default = "; 48 unless set, with speculation" if self.settings["speculative_algorithm"] else ""
            warnings.append(
                "the server runs at most %d requests at once (max_running_requests%s): levels above that measure its"
                " queue" % (most, default)
            )
        if self.generator.renders:
            note = self._render()
            warnings += [note] if note else []
            with open(self._target.path("prompts.jsonl"), encoding="ascii") as source:
                self._prompts = [json.loads(line) for line in source]
        return version, warnings

    def _python(self):
        """The interpreter of the generator: the profile's `bench: {python: ...}`, else the one that serves."""
        named = (self._context.args.get("pythons") or {}).get(self._attempt["profile"])
        if named:
            return os.path.expanduser(named)
        program = self._attempt["argv"][0]
        if os.path.basename(program).startswith("python"):
            return program
        return os.path.expanduser(self._context.host.get("python") or self._context.python)

    def _find_generator(self):
        """The generator's version, or None where it tells none; one that is not there is found missing here."""
        argv = [self._target.python, "-c", _LOOK, *self.generator.module.partition(".")[::2]]
        status, said = self._helper(argv, _FIND_S, "the look for %s" % self.generator.name)
        if status != 0:
            raise Failure(
                "%s cannot run %s: %s"
                % (self._target.python, self.generator.name, loadgen.last_words(said.encode("utf-8"))),
                kind="no-generator",
                hint=self.generator.hint.format(python=self._target.python),
            )
        for line in said.splitlines():
            if line.startswith("deployctl-version "):
                return line.split()[1]
        return None

    def _render(self):
        """Write prompts.jsonl; what there is to say about it, or ""."""
        from . import loadgen_render as _  # noqa: F401 - named here so that its text is sent along

        target = self._target
        if os.path.exists(target.path("prompts.jsonl")):
            return ""  # a bench that goes on
        program, source = target.path("render.py"), target.path("conversations.jsonl")
        write_file(program, self._context.sources["loadgen_render"].encode("utf-8"), 0o600)
        lines = "".join(json.dumps({"messages": prompt}) + "\n" for prompt in self._prompts)
        write_file(source, lines.encode("ascii"), 0o600)
        argv = [target.python, program, source, target.path("prompts.jsonl"), str(target.tokenizer or "")]
        status, said = self._helper(argv, _RENDER_S, "the chat template")
        if status != 0:
            raise Failure(
                "the prompts could not be made ready: %s" % loadgen.last_words(said.encode("utf-8")), kind="render"
            )
        for name in (program, source):
            os.unlink(name)
        for line in said.splitlines():
            if line.startswith("deployctl-render "):
                return json.loads(line.partition(" ")[2])["note"]
        return ""

    def _helper(self, argv, timeout_s, label):
        """(exit status, last output) of a short program in the generator's environment."""
        output = script.Output()
        process = script.start(argv, self._target.cwd, self._target.environment, label)
        try:
            script.follow(self._context, process, {process.stdout.fileno(): output.feed}, timeout_s, label)
        finally:
            process.stdout.close()
        return process.returncode, output.tail()

    # -- one level ---------------------------------------------------------------------------------------------------

    def run(self, concurrency):
        """Run one level.

        Returns:
            Its entry of the record, or None when the server has gone meanwhile.

        Raises:
            Cancelled: The client asked to stop or went away.
            Failure: The disk is full, or the generator is not there.
        """
        target, sent = self._target, requests_of(self._load, concurrency)
        raw = target.path(self.generator.raw_name % concurrency)
        data = target.path("data-c%d.jsonl" % concurrency)
        event = {"concurrency": concurrency, "sent": sent}
        self._context.wire.event("level", state="start", completed=0, **event)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(raw)  # of the try that a lost link has ended
        write_file(data, self._data(sent), 0o600)
        target.environment["HF_DATASETS_CACHE"] = target.path("cache")
        argv = self.generator.argv(target, self._load, concurrency, sent, data, raw)
        output = _Output(self._context.wire, self.generator, target.path("generator-c%d.log" % concurrency), event)
        problem, gives_up, timed_out = "", False, False
        label = "%s at %d" % (self.generator.name, concurrency)
        process = script.start(argv, target.cwd, target.environment, label)
        began = time.monotonic()
        try:
            sinks = {process.stdout.fileno(): output.feed}
            script.follow(self._context, process, sinks, self._timeout_s, label, done=self.server_is_gone)
        except Cancelled:
            raise
        except Failure as failure:
            if failure.kind != "timeout":
                raise
            timed_out = True
            problem = "not through within %g s: %d of %d requests answered" % (self._timeout_s, output.completed, sent)
        finally:
            process.stdout.close()
            output.close()
            for path in (data, target.path("guidellm.json")):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            shutil.rmtree(target.path("cache"), ignore_errors=True)
        if self.server_is_gone():
            return None
        summary = None
        if not timed_out:
            try:
                summary = self.generator.read(raw)
            except Exception as error:
                said = loadgen.last_words(output.tail)
                self._refuse_what_lacks(said)
                gives_up = True
                how = script.describe(process.returncode)
                problem = "%s gave no result (%s): %s" % (self.generator.name, how, said or error)
        if summary is None:
            summary = _nothing(output.completed, [problem], round(time.monotonic() - began, 3))
        elif summary["completed"] != sent:
            first = ": %s" % summary["errors"][0] if summary["errors"] else ""
            problem = "%d of %d requests failed%s" % (sent - summary["completed"], sent, first)
            if summary["tried"] < sent and not first:
                problem = "%s sent %d of %d requests" % (self.generator.name, summary["tried"], sent)
                problem += ": it leaves out prompts of less than two tokens" if self.generator.renders else ""
        summary.pop("tried", None)
        if problem and self._dies():
            return None
        return dict(
            {"concurrency": concurrency, "sent": sent},
            state="failed" if problem else "done",
            problem=problem or None,
            gives_up=gives_up or timed_out,
            **summary,
        )

    def _refuse_what_lacks(self, said):
        """A generator that lacks a package or space fails in every level, and for a reason of the host's.

        Raises:
            Failure: That is what its last words say.
        """
        missing = re.search(r"No module named '?([\w.]+)", said)
        if missing:
            package = missing.group(1).partition(".")[0]
            raise Failure(
                "%s lacks a package: %s" % (self.generator.name, said),
                kind="no-generator",
                hint="on the host: %s -m pip install %s" % (self._target.python, package),
            )
        if "No space left" in said or "Errno 28" in said:
            raise Failure(
                "no space left on %s: %s could not write its result" % (self._folder, self.generator.name),
                kind="disk-full",
                hint="free some space there (df -h %s)" % self._folder,
            )

    def _data(self, sent):
        """The data set of a level: the prompts in the seed's order, again from the first where there are too few."""
        order = list(range(len(self._prompts)))
        random.Random(self._load["seed"]).shuffle(order)  # noqa: S311 - an order that can be had again
        rows = [self.generator.row(self._prompts[order[number % len(order)]]) for number in range(sent)]
        return "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")

    def server_is_gone(self):
        """Whether the server has died, is dying, or is being stopped: then the generator is of no use."""
        self.watcher.tick()
        now = time.monotonic()
        if now - self._stop_looked_at > _STOP_LOOK_S:
            self._stop_looked_at = now
            verdict = self._context.state.read_json("attempts", self._attempt["attempt"], "verdict.json") or {}
            stopping = verdict.get("stopping")
            if stopping and stopping["at"] >= self._began:
                self.stopped_by = stopping.get("by") or "somebody"
        return self.watcher.ended or self.watcher.doomed or self.stopped_by is not None

    def _dies(self):
        """After a level that failed: whether that was the server's end, which may take moments to show."""
        finish = time.monotonic() + _DEATH_S
        self.watcher.tick(look_at_ranks=True)
        while time.monotonic() < finish and not self._context.wire.cancelled.is_set():
            if self.server_is_gone():
                self.watcher.settle()
                return self.watcher.ended or self.stopped_by is not None
            time.sleep(0.03)
        return False


def _nothing(completed, errors, duration_s):
    """The summary of a level without a result."""
    empty = loadgen.distribution([])
    numbers = ("input_tokens", "output_tokens", "output_tok_per_s", "requests_per_s", "accept_length")
    return dict(
        dict.fromkeys(numbers),
        completed=completed,
        errors=errors,
        duration_s=duration_s,
        ttft_ms=empty,
        tpot_ms=empty,
        itl_ms=empty,
        e2e_ms=empty,
    )


class _Output:
    """What a generator prints: a log of bounded size, its last words, and how far it is."""

    def __init__(self, wire, generator, path, event):
        self._wire = wire
        self._generator = generator
        self._event = event
        self._room = _LOG_BYTES
        self._told_at = 0.0
        self._path = path
        self.completed = 0
        self.tail = b""
        try:
            self._log = open(path, "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise disk_failure(error, path) from error

    def feed(self, chunk):
        """Take some bytes.

        Raises:
            Failure: The disk is full.
        """
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        kept = chunk[: self._room]
        self._room -= len(kept)
        try:
            self._log.write(kept)
            if kept and not self._room:
                self._log.write(b"\n[... the rest is left out]\n")
            self._log.flush()
        except OSError as error:
            raise disk_failure(error, self._path) from error
        completed = self._generator.completed(self.tail, self._event["sent"])
        now = time.monotonic()
        if completed is not None and completed != self.completed:
            self.completed = completed
            if now - self._told_at >= _EVENT_S:
                self._told_at = now
                self._wire.event("level", state="progress", completed=completed, **self._event)

    def close(self):
        """No more output."""
        try:
            self._log.close()
        except OSError:
            pass  # the disk is full: said where it mattered
