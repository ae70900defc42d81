"""An interpreter with the stand-in engine installed, as a wheel install would leave it."""

import base64
import hashlib
import shutil
import subprocess
from importlib import resources
from pathlib import Path

VERSION = "0.5.12+standin"
_DIST_INFO = f"sglang-{VERSION}.dist-info"


def standin_source() -> Path:
    """The folder of the stand-in's sources."""
    return Path(str(resources.files("deployctl.demo").joinpath("standin", "sglang")))


def build_site(root: Path, *, python: str, editable: bool = False) -> Path:
    """Make a virtual environment at `root`/ml-env and install the stand-in engine into it.

    Args:
        root: An existing folder.
        python: The interpreter to make it with.
        editable: Install from a git work tree at `root`/sglang-source through a .pth file instead.

    Returns:
        The environment's interpreter.
    """
    environment = root / "ml-env"
    subprocess.run([python, "-m", "venv", "--without-pip", str(environment)], check=True, capture_output=True)
    interpreter = environment / "bin" / "python3"
    shown = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    )
    purelib = Path(shown.stdout.strip())
    if editable:
        _install_editable(root / "sglang-source", purelib)
    else:
        _copy(purelib / "sglang")
        _write_dist_info(purelib, _hashed(purelib / "sglang", purelib))
    return interpreter


def _copy(target: Path) -> None:
    shutil.copytree(standin_source(), target, ignore=shutil.ignore_patterns("__pycache__"))


def _hashed(package: Path, purelib: Path) -> list[str]:
    rows = []
    for path in sorted(package.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{path.relative_to(purelib).as_posix()},sha256={digest},{len(content)}")
    return rows


def _write_dist_info(purelib: Path, rows: list[str]) -> None:
    info = purelib / _DIST_INFO
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
    (info / "INSTALLER").write_text("deployctl\n")
    own = [f"{_DIST_INFO}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("\n".join([*rows, *own]) + "\n")


def _install_editable(source: Path, purelib: Path) -> None:
    (source / "python").mkdir(parents=True)
    _copy(source / "python" / "sglang")
    git = ["git", "-C", str(source), "-c", "user.name=demo", "-c", "user.email=demo@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "the engine"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (purelib / "__editable__.sglang.pth").write_text(str(source / "python") + "\n")
    _write_dist_info(purelib, ["__editable__.sglang.pth,,"])
