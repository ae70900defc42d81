"""Build, once, a virtual environment with real SGLang for the CPU, and print its interpreter.

    python tests/engine/env/build.py

The environment lies under $XDG_CACHE_HOME/deployctl-engine (else ~/.cache) and is named by the hash of what it is made
of, so a change of the pins builds a new one. Two builders wait for each other. Standard library only.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = "3.11"


def say(text: str) -> None:
    """Progress goes to stderr: stdout ends with the interpreter's path."""
    print(text, file=sys.stderr, flush=True)


def find_python() -> str:
    """A CPython 3.11, from PATH or pyenv."""
    candidates = [sys.executable, shutil.which(f"python{PYTHON}") or ""]
    candidates += [str(path) for path in sorted(Path("~/.pyenv/versions").expanduser().glob(f"{PYTHON}*/bin/python3"))]
    for candidate in candidates:
        if not candidate:
            continue
        shown = subprocess.run(
            [candidate, "-c", "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shown.stdout.strip() == PYTHON:
            return os.path.realpath(candidate)
    raise SystemExit(f"the engine's pins need Python {PYTHON}: apt install python{PYTHON}-venv, or pyenv install {PYTHON}")


def inputs_hash(python: str) -> str:
    """What the environment is made of."""
    hasher = hashlib.sha256(python.encode())
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".txt", ""):
            hasher.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:16]


def build(python: str, target: Path) -> None:
    """Make the environment in place; the file `complete` is written last."""
    if target.exists():
        say(f"removing what an interrupted build left at {target}")
        shutil.rmtree(target)
    say(f"building the engine's environment at {target} (a few GB, several minutes)")
    subprocess.run([python, "-m", "venv", str(target)], check=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "--no-deps", "-r", str(HERE / "requirements-nodeps.txt")], check=True, stdout=sys.stderr)
    purelib = next((target / "lib").glob("python*/site-packages"))
    shutil.copytree(HERE / "stub", purelib, dirs_exist_ok=True)
    # The first import compiles thousands of modules: not while a test is waiting.
    environment = dict(os.environ, SGLANG_USE_CPU_ENGINE="1")
    subprocess.run(
        [str(target / "bin" / "python"), "-c", "import sglang.srt.entrypoints.http_server"],
        check=True,
        env=environment,
        stdout=sys.stderr,
    )
    (target / "complete").write_text("")


def main() -> None:
    """Build what is missing and print the interpreter."""
    python = find_python()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deployctl-engine"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / inputs_hash(python)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "complete").exists():
            build(python, target)
    print(target / "bin" / "python")


if __name__ == "__main__":
    main()
