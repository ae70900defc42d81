"""A push against what a person would type, on one loopback sshd behind a relay that adds a round trip of 50 ms.

    python benchmarks/push.py [--rounds 7] [--rtt-ms 50]

Three arms, interleaved: `deployctl push` (the whole command, interpreter start included); one cold `ssh host sh -s` fed
with the same chain (script, run, import check); and the person's scp + ssh + ssh. Every round pushes another version of
one script that changes two files. Medians and ratios are printed; `--help` start-up is compared with importing Typer.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from rig import Rig  # noqa: E402
from sshd_rig import Relay  # noqa: E402

SCRIPT = """\
# /// deployctl
# package = "sglang"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# ///
import pathlib, sys
for name in ("srt/server_args.py", "srt/speculative/eagle_worker.py"):
    target = pathlib.Path(sys.argv[1]) / name
    text = target.read_text().split("# bench")[0]
    target.write_text(text + "# bench {number}\\n")
"""


def timed(argv: list[str], env: dict[str, str], **options: object) -> float:
    """Seconds of a command that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(argv, env=env, capture_output=True, check=False, **options)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"{argv}: {done.stderr.decode()}{done.stdout.decode()}")
    return seconds


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Rig(Path(folder)) as rig,
        Relay(rig.sshd.port, options.rtt_ms / 2000) as relay,
    ):
        known = rig.sshd.known_hosts
        known.write_text(known.read_text() + f"[127.0.0.1]:{relay.port} {rig.sshd.host_key_line}\n")
        rig.write_hosts(relay.port)
        patch = rig.work / "patches" / "bench" / "b1.py"
        patch.parent.mkdir()
        ssh = ["ssh", "-F", str(rig.sshd.config), "-p", str(relay.port), "127.0.0.1"]
        check = f"{rig.python} -c 'import sglang.srt.server_args, sglang.srt.speculative.eagle_worker'"
        arms: dict[str, list[float]] = {"deployctl push": [], "ssh host sh -s": [], "scp + ssh + ssh": []}
        rig.run("push", "--patch", "v3")
        rig.run("rollback")
        for number in range(options.rounds):
            script = SCRIPT.replace("{number}", str(number))
            patch.write_text(script)
            deployctl = [str(Path(sys.executable).parent / "deployctl"), "push", "--patch", "bench/b1"]
            arms["deployctl push"].append(timed(deployctl, rig.environment, cwd=rig.work))
            rig.run("rollback", "--to", "base")
            # By hand the change is made in place: afterwards the files are put back for the next round.
            before = {path: path.read_bytes() for path in rig.package.rglob("*.py")}
            chain = (
                f"set -e; cat > {rig.home}/p.py <<'PATCH'\n{script}PATCH\n"
                f"{rig.python} {rig.home}/p.py {rig.package}\n{check}\n"
            )
            arms["ssh host sh -s"].append(timed([*ssh, "sh -s"], rig.environment, input=chain.encode()))
            restore(before)
            began = time.perf_counter()
            scp = [
                "scp",
                "-q",
                "-F",
                str(rig.sshd.config),
                "-P",
                str(relay.port),
                str(patch),
                f"127.0.0.1:{rig.home}/p.py",
            ]
            timed(scp, rig.environment)
            timed([*ssh, f"{rig.python} {rig.home}/p.py {rig.package}"], rig.environment)
            timed([*ssh, check], rig.environment)
            arms["scp + ssh + ssh"].append(time.perf_counter() - began)
            restore(before)
        base = statistics.median(arms["ssh host sh -s"])
        print(f"round trip {options.rtt_ms:g} ms, {options.rounds} rounds, medians")
        for name, values in arms.items():
            middle = statistics.median(values)
            print(f"  {name:<18} {middle:6.3f} s   {middle / base:5.2f} x ssh host sh -s")
        start = [timed([str(Path(sys.executable).parent / "deployctl"), "--help"], dict(os.environ)) for _ in range(7)]
        typer = [timed([sys.executable, "-c", "import typer"], dict(os.environ)) for _ in range(7)]
        print(f"  deployctl --help   {statistics.median(start):.3f} s, import typer {statistics.median(typer):.3f} s")


def restore(before: dict[Path, bytes]) -> None:
    """Put files back as they were, stat included enough for nobody to wonder."""
    for path, content in before.items():
        if path.read_bytes() != content:
            path.write_bytes(content)


if __name__ == "__main__":
    main()
