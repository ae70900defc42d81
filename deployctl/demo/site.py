"""An interpreter with the stand-in engine installed, as a wheel install or an editable install would leave it."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

VERSION = "0.5.12+standin"

_DIST_INFO = f"sglang-{VERSION}.dist-info"
_METADATA = f"""Metadata-Version: 2.1
Name: sglang
Version: {VERSION}
Summary: A stand-in for the SGLang inference engine: its log, processes, endpoints and faults, and no model.
Requires-Python: >=3.8
"""
_WHEEL = """Wheel-Version: 1.0
Generator: deployctl
Root-Is-Purelib: true
Tag: py3-none-any
"""


def standin_source() -> Path:
    """The folder of the stand-in's sources, the package `sglang`."""
    return Path(str(resources.files("deployctl.demo").joinpath("standin", "sglang")))


def patches_source() -> Path:
    """The folder of the demo's patches: `<series>/<version>.py`."""
    return Path(str(resources.files("deployctl.demo").joinpath("patches")))


def build_site(root: Path, *, python: str, editable: bool = False) -> Path:
    """Make a virtual environment at `root`/ml-env, without pip, and install the stand-in engine into it.

    Args:
        root: An existing folder.
        python: The interpreter to make it with, 3.8 or later.
        editable: Install by a .pth file from `root`/sglang-source/python, a git work tree with one commit.

    Returns:
        The environment's interpreter.

    Raises:
        subprocess.CalledProcessError: The environment or the git repository could not be made.
    """
    root = root.absolute()
    environment = root / "ml-env"
    subprocess.run([python, "-m", "venv", "--without-pip", str(environment)], check=True, capture_output=True)
    interpreter = environment / "bin" / "python3"
    purelib = _purelib(interpreter)
    if editable:
        _install_editable(root / "sglang-source", purelib)
    else:
        _install_wheel(purelib)
    return interpreter


def package_directory(interpreter: Path) -> Path:
    """Where an interpreter of `build_site` has its `sglang`, wheel or editable."""
    purelib = _purelib(interpreter)
    pth = purelib / "__editable__.sglang.pth"
    return (Path(pth.read_text().strip()) if pth.exists() else purelib) / "sglang"


def _purelib(interpreter: Path) -> Path:
    shown = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(shown.stdout.strip())


def _install_wheel(purelib: Path) -> None:
    _copy_package(purelib / "sglang")
    files = [path for path in sorted((purelib / "sglang").rglob("*")) if path.is_file()]
    _write_dist_info(purelib, files, {"METADATA": _METADATA, "WHEEL": _WHEEL, "INSTALLER": "deployctl\n"})


def _install_editable(source: Path, purelib: Path) -> None:
    (source / "python").mkdir(parents=True)
    _copy_package(source / "python" / "sglang")
    (source / ".gitignore").write_text("__pycache__/\n")
    # The user's own git settings (hooks, signing, templates) must not matter here.
    environment = dict(os.environ, GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull)
    git = ["git", "-C", str(source), "-c", "user.name=demo", "-c", "user.email=demo@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "The engine as released"]):
        subprocess.run([*git, *words], check=True, capture_output=True, env=environment)
    pth = purelib / "__editable__.sglang.pth"
    pth.write_text(f"{source / 'python'}\n")
    origin = {"url": (source / "python").as_uri(), "dir_info": {"editable": True}}
    texts = {"METADATA": _METADATA, "INSTALLER": "deployctl\n", "direct_url.json": json.dumps(origin)}
    _write_dist_info(purelib, [pth], texts)


def _copy_package(target: Path) -> None:
    shutil.copytree(standin_source(), target, ignore=shutil.ignore_patterns("__pycache__"))


def _write_dist_info(purelib: Path, installed: list[Path], texts: dict[str, str]) -> None:
    info = purelib / _DIST_INFO
    info.mkdir()
    for name, text in texts.items():
        (info / name).write_text(text)
    rows = [_record_row(path, purelib) for path in [*installed, *(info / name for name in sorted(texts))]]
    (info / "RECORD").write_text("\n".join([*rows, f"{_DIST_INFO}/RECORD,,"]) + "\n")


def _record_row(path: Path, purelib: Path) -> str:
    """A row of RECORD: path, sha256 in urlsafe base64 without padding, size."""
    content = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(purelib).as_posix()},sha256={digest},{len(content)}"
