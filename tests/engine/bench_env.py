"""What the engine's load generator needs beside the engine's environment: installed once and kept, like that one."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "env" / "requirements-bench.txt"


def cache_root() -> Path:
    """The folder of what is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "deployctl-bench"


def kept(name: str, key: str, build) -> Path:
    """A folder of the cache, built at first need by `build(folder)`; a marker, written last, says that it is complete."""
    folder = cache_root() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            (folder / "complete").write_text("")
    return folder


def generator_packages(python: str) -> Path:
    """A folder with the packages of requirements-bench.txt for an interpreter."""

    def build(folder: Path) -> None:
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", folder, "-r", REQUIREMENTS], check=True)

    return kept("packages", REQUIREMENTS.read_text() + python, build)


GUIDELLM = "guidellm==0.8.1"


def guidellm_python(python: str) -> Path:
    """An interpreter with guidellm, for servers that are not SGLang.

    It shares what the engine's environment has of its needs (PyTorch above all), and has the rest of its own.
    """

    def build(folder: Path) -> None:
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        own = next((folder / "env").glob("lib/python*/site-packages"))
        shared = next(Path(python).parent.parent.glob("lib/python*/site-packages"))
        (own / "shared.pth").write_text(f"{shared}\n")
        # What it says of the engine's own requirements, which are not all there, is nothing new.
        install = [folder / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, GUIDELLM], check=True, stderr=subprocess.DEVNULL)

    return kept("guidellm", GUIDELLM + python, build) / "env" / "bin" / "python"
