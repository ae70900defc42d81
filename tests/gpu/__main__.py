"""Measures the shipped dynamic speculation on this machine's GPU, through deployctl. See `--help`.

Exit status: 0 all criteria hold; 1 one does not, or a part failed; 3 all that ran hold, but not all ran.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import arms, tables, verdicts
from .servers import Fleet
from .session import PROJECT, Clock, Session, machine
from .stages import bench, crashes, features, life, meaning, profile, speed

PATCH = "dynamic_spec/v4"
# One pair of models after the other: all servers at once do not fit on a card.
GROUPS: tuple[tuple[str, ...], ...] = (("speed", "life", "profile"), ("meaning", "features", "bench"), ("crashes",))
STAGES: dict[str, Any] = {
    "speed": speed,
    "life": life,
    "profile": profile,
    "meaning": meaning,
    "features": features,
    "bench": bench,
    "crashes": crashes,
}
PAIRS = {"a": ("--agree", "0.65"), "b": ("--agree", "0.7", "--context", "0.1")}
_LAYERS_OF_B = 8
_RESERVE_S = 75.0
_LOAD_S = 330.0
_REHEARSED = ("a-base-no-overlap", "a-v1-dynamic", "b-base-no-overlap", "b-v1-dynamic", "b-base-no-overlap-grammar")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder of what is kept (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=3600.0, help="the servers are stopped by then (default: %(default)g)"
    )
    parser.add_argument("--stages", default=",".join(STAGES), help="some of %(default)s")
    parser.add_argument("--layers", type=int, default=40, help="of pair a's target (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer concurrencies, one repeat, fewer samples")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "deployctl-gpu-models",
        help="kept between runs (default: %(default)s)",
    )
    parser.add_argument("--work", type=Path, help="folder of hosts.yaml, state and whole logs (default: a new one)")
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="MODEL",
        help="on the CPU with this small model and without speculation: tries this program, measures nothing",
    )
    options = parser.parse_args(words)
    options.stages = [name for name in options.stages.split(",") if name]
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    return options


def make_models(session: Session, pairs: Sequence[str]) -> None:
    """Once a run and pair; in a process of its own, which gives the GPU's memory back."""
    for pair in pairs:
        if pair in session.results["stages"].get("models", {}):
            continue
        folder = session.models / pair
        if session.options.rehearse:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("target", "draft"):
                with contextlib.suppress(FileExistsError):
                    (folder / name).symlink_to(session.options.rehearse.resolve())
            continue
        layers = session.options.layers if pair == "a" else _LAYERS_OF_B
        command = [sys.executable, "-m", "tests.gpu.models", str(folder), "--layers", str(layers), *PAIRS[pair]]
        began = time.monotonic()
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
        session.say(
            f"models of pair {pair}: {(done.stdout + done.stderr).strip()[-1500:]} ({time.monotonic() - began:.0f} s)"
        )
        session.record("models", pair, {"exit": done.returncode, "said": done.stdout.strip()})
        if done.returncode:
            del session.results["stages"]["models"][pair]
            raise RuntimeError(f"the models of pair {pair} could not be made: {done.stderr[-1500:]}")


def needed(session: Session, stages: Sequence[str]) -> list[arms.Arm]:
    """The arms of some stages, each once, in the order in which they matter."""
    known = arms.all_arms()
    keys = list(dict.fromkeys(key for stage in stages for key in STAGES[stage].NEEDS))
    if session.options.rehearse:
        keys = [key for key in keys if key in _REHEARSED]
    return [known[key] for key in keys if key in known]


def run_group(session: Session, stages: Sequence[str]) -> None:
    """Start what the stages need, run them, stop it."""
    fleet = Fleet(session)
    wanted = needed(session, stages)
    try:
        if wanted:
            make_models(session, sorted({arm.pair for arm in wanted}))
            fleet.start(wanted, min(_LOAD_S, session.clock.left_s()))
        elif "crashes" in stages:
            make_models(session, ["a"])
        for stage in stages:
            guarded(session, f"stage {stage}", lambda stage=stage: STAGES[stage].run(session, fleet))
    finally:
        stopped = fleet.stop() if wanted else True
        session.verdicts(
            [verdicts.judge("deployctl", f"servers of {', '.join(stages)} stopped", stopped, holds=stopped)]
        )


def guarded(session: Session, what: str, work: Callable[[], None]) -> None:
    """Whatever fails in one part, the others are run."""
    session.say(f"--- {what}")
    try:
        work()
    except Exception as error:
        session.error(what, error)


def push(session: Session) -> bool:
    """The patch on the engine; asked of doctor and status before."""
    session.deployctl("doctor", timeout_s=120)
    session.deployctl("status", timeout_s=60)
    answer = session.ask("push", "--patch", PATCH, timeout_s=300)
    session.record("deployctl", "push", answer)
    done = answer["exit_code"] == 0
    session.verdicts([verdicts.judge("deployctl", f"push of {PATCH}", answer.get("status"), holds=done)])
    return done


def put_back(session: Session) -> None:
    """The engine as it was, and the proof of it."""
    session.ask("stop", timeout_s=60)
    session.ask("rollback", "--to", "base", timeout_s=120)
    session.deployctl("history", timeout_s=60)
    status = session.ask("status", timeout_s=60)
    back = status.get("release") in (0, None) and status.get("drift") == [] and status.get("server") is None
    session.record("deployctl", "status at the end", {key: status.get(key) for key in ("release", "drift", "server")})
    session.verdicts([verdicts.judge("deployctl", "base again, nothing runs", status.get("release"), holds=back)])


def measure(session: Session) -> None:
    """Every group of stages that is wanted."""
    groups = [stages for group in GROUPS if (stages := [stage for stage in group if stage in session.options.stages])]
    pairs = {arm.pair for arm in needed(session, groups[0])} if groups else set()
    # The first models are made beside the push; later ones not beside a measurement.
    making = threading.Thread(target=guarded, args=(session, "models", lambda: make_models(session, sorted(pairs))))
    making.start()
    pushed = bool(groups) and groups[0] != ["crashes"] and push(session)
    making.join()
    for stages in groups:
        if stages == ["crashes"]:
            if pushed:
                session.ask("rollback", "--to", "base", timeout_s=120)
            guarded(session, "crashes", lambda: run_group(session, ["crashes"]))
            continue
        if not pushed:
            session.skip(", ".join(stages), f"{PATCH} was not pushed")
            continue
        guarded(session, ", ".join(stages), lambda stages=stages: run_group(session, stages))


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    options = parse(sys.argv[1:] if words is None else words)
    work = options.work or Path(tempfile.mkdtemp(prefix="deployctl-gpu-"))
    models = work / "models" if options.rehearse else options.models
    session = Session(
        options.out.resolve(),
        work.resolve(),
        models.resolve(),
        options,
        Clock(options.deadline_s, min(_RESERVE_S, options.deadline_s / 4)),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    session.results["machine"] = machine()
    session.results["options"] = {key: str(value) for key, value in vars(options).items()}
    session.say(session.results["machine"], "work folder", work)
    try:
        measure(session)
    except BaseException as error:
        session.error("run", error)
        if not isinstance(error, Exception):
            raise
    finally:
        guarded(session, "putting the engine back", lambda: put_back(session))
        guarded(session, "tables", lambda: finish(session))
    status = verdicts.exit_status(session.results["verdicts"], len(session.results["errors"]))
    session.say(f"exit {status}; see {session.out}")
    return status


def finish(session: Session) -> None:
    """Write the tables, and say how it stands."""
    session.save()
    (session.out / "table.md").write_text(tables.markdown(session.results))
    outcomes = [verdict["outcome"] for verdict in session.results["verdicts"]]
    session.say(
        {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        f"errors {len(session.results['errors'])}, not run {len(session.results['skipped'])}",
    )


if __name__ == "__main__":
    sys.exit(main())
