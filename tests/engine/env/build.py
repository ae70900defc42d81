"""Builds (or finds) the virtual environment that holds a real SGLang for the engine tests. Standard library only.

    python3 build.py            the venv's interpreter is the last line of stdout; progress goes to stderr
    python3 build.py --prune    also removes environments of earlier inputs

The environment lies under ${XDG_CACHE_HOME:-~/.cache}/deployctl-engine/<hash>, where the hash covers everything that
goes into it: this file, the two requirement lists, the stubs, Python's minor version and the machine's architecture.
It is built where it will be used, because a venv's scripts carry its path; a marker file, written last, says that it
is complete. Without the marker the folder is waste and is built again. A kernel lock keeps two builders apart.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = "3.11"  # the wheels of the requirement lists are pinned for this one
DISK_NEEDED_GB = (
    8  # 6.0 GB measured, most of it CUDA libraries that PyTorch's wheel links to even where there is no GPU
)
MARKER = "complete.json"
# What the interpreter itself must have been built with.
INTERPRETER_PROBE = (
    "import sys, venv, ensurepip, ssl, ctypes, lzma, bz2; "
    f"assert '%d.%d' % sys.version_info[:2] == {PYTHON!r}; assert sys.implementation.name == 'cpython'"
)
# What must import before the environment counts as complete; the same modules that a server loads.
IMPORT_PROBE = (
    "import sglang.launch_server, sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server, "
    "sglang.srt.speculative.eagle_worker"
)
ENGINE_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class BuildError(Exception):
    """A build that cannot go on; the text says what to do about it."""


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(f"[engine env] {text}", file=sys.stderr, flush=True)


def inputs() -> list[Path]:
    """The files that decide what the environment holds, in a fixed order."""
    stubs = sorted(p for p in (HERE / "stubs").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [HERE / "build.py", HERE / "requirements.txt", HERE / "requirements-nodeps.txt", *stubs]


def environment_key() -> str:
    """The hash that names the environment."""
    digest = hashlib.sha256(f"{PYTHON} {platform.system()} {platform.machine()}\0".encode())
    for path in inputs():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(HERE).as_posix()} {len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """The folder that holds the environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "deployctl-engine"


def completed(directory: Path) -> Path | None:
    """The interpreter of a complete environment, or None when it is missing, half built or its base Python is gone."""
    python = directory / "bin" / "python"
    return python if (directory / MARKER).is_file() and python.exists() else None


def candidates() -> list[Path]:
    """Interpreters that may be the right Python: ours, pyenv's and uv's own folders, then PATH."""
    found = [Path(getattr(sys, "_base_executable", sys.executable))]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += sorted(pyenv.glob(f"versions/{PYTHON}.*/bin/python{PYTHON}"), reverse=True)
    found += sorted(Path.home().glob(f".local/share/uv/python/cpython-{PYTHON}.*/bin/python{PYTHON}"), reverse=True)
    found += [Path(folder) / f"python{PYTHON}" for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    return [path for path in found if path.is_file()]


def find_python() -> Path:
    """The first interpreter that is CPython of the right version and can make a venv.

    Raises BuildError naming what was tried and what to install.
    """
    refused = []
    for path in dict.fromkeys(candidates()):
        probe = subprocess.run([path, "-I", "-c", INTERPRETER_PROBE], capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return path
        refused.append(f"{path}: {(probe.stderr.strip().splitlines() or ['does not start'])[-1]}")
    tried = "".join(f"\n  {line}" for line in refused) or " nothing was found"
    raise BuildError(
        f"no usable CPython {PYTHON} (the engine's wheels are pinned for it). Tried:{tried}\n"
        f"Install one: `apt-get install python{PYTHON} python{PYTHON}-venv`, or `pyenv install {PYTHON}`."
    )


def check_machine(root: Path) -> None:
    """Raises BuildError where the wheels cannot run or do not fit."""
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        raise BuildError(f"the engine's wheels are for Linux x86_64 with glibc 2.34 or newer; this is {system}")
    free_gb = shutil.disk_usage(root).free / 1e9
    if free_gb < DISK_NEEDED_GB:
        raise BuildError(
            f"{root} has {free_gb:.1f} GB free, the environment needs {DISK_NEEDED_GB} GB. "
            "Free some, or set XDG_CACHE_HOME to a folder on a larger disk."
        )


def run(label: str, command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    """Runs one step with its output on stderr; raises BuildError when it fails."""
    say(f"{label} ...")
    begun = time.monotonic()
    done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, **(environment or {})}, check=False)
    if done.returncode != 0:
        raise BuildError(f"{label} failed with exit status {done.returncode}: {' '.join(map(str, command))}")
    say(f"{label}: {time.monotonic() - begun:.0f} s")


def install_stubs(python: Path) -> None:
    """Copies the stub packages into the environment, each dist-info with a RECORD that lists what was copied."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())
    lines = []
    for source in inputs():
        if HERE / "stubs" not in source.parents:
            continue
        relative = source.relative_to(HERE / "stubs")
        (site / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, site / relative)
        lines.append(f"{relative.as_posix()},,\n")
    for info in (HERE / "stubs").glob("*.dist-info"):
        (site / info.name / "RECORD").write_text("".join([*lines, f"{info.name}/RECORD,,\n"]))


def build(directory: Path) -> Path:
    """Builds the environment from nothing and returns its interpreter. The caller holds the lock.

    Raises BuildError; the folder is then left without its marker and is built again next time.
    """
    base = find_python()
    if directory.exists():
        say(f"removing a half-built {directory}")
        shutil.rmtree(directory)
    check_machine(directory.parent)
    say(f"building {directory} with {base} (some minutes, about 6 GB)")
    run("venv", [base, "-m", "venv", directory])
    python = directory / "bin" / "python"
    # Bytecode is compiled afterwards on all cores, which is faster than pip's own way.
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--no-compile",
        "-qq",
    ]
    run("packages", [*pip, "-r", HERE / "requirements.txt"])
    run("engine", [*pip, "--no-deps", "-r", HERE / "requirements-nodeps.txt"])
    install_stubs(python)
    # Some packages ship files for other Python versions; a file that does not compile is no reason to stop.
    say("bytecode ...")
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", directory / "lib"], stdout=sys.stderr, check=False)
    run("import check", [python, "-c", IMPORT_PROBE], ENGINE_ENVIRONMENT)
    marker = {"python": str(base), "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    (directory / (MARKER + ".part")).write_text(json.dumps(marker) + "\n")
    (directory / (MARKER + ".part")).rename(directory / MARKER)
    return python


def locked_build(directory: Path) -> Path:
    """Builds under the environment's lock, or waits for the builder that holds it and takes what it made."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".lock"), "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"process {lock.read().strip() or '?'} is building this environment; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        return completed(directory) or build(directory)


def prune(keep: Path) -> None:
    """Removes the environments of other inputs, except those that a builder is working on."""
    for other in sorted(path for path in keep.parent.iterdir() if path.is_dir() and path != keep):
        with open(other.with_suffix(".lock"), "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"left alone: {other} is being built")
                continue
            shutil.rmtree(other)
            say(f"removed {other}")


def main() -> int:
    """Command line: exit 0 with the interpreter's path as the last line of stdout, exit 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description="Build or find the virtual environment with a real SGLang.")
    parser.add_argument("--prune", action="store_true", help="also remove environments of earlier inputs")
    arguments = parser.parse_args()
    directory = cache_root() / environment_key()
    try:
        python = completed(directory) or locked_build(directory)
        if arguments.prune:
            prune(directory)
    except (BuildError, OSError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
