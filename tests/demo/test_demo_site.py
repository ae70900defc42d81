"""The environment with the stand-in engine is what pip would have left."""

import ast
import base64
import csv
import hashlib
import json
import subprocess
import sys

import pytest

from deployctl.demo.site import VERSION, build_site, package_directory, patches_source, standin_source


def run(python, code, cwd):
    return subprocess.run([str(python), "-c", code], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def record_of(directory):
    """RECORD beside a package: path → (hash, size)."""
    info = directory / f"sglang-{VERSION}.dist-info"
    return {row[0]: (row[1], row[2]) for row in csv.reader((info / "RECORD").read_text().splitlines())}


def test_a_wheel_install_records_every_file_with_its_hash_and_size(site):
    """RECORD and the installed files agree in both directions."""
    package = package_directory(site)
    record = record_of(package.parent)
    on_disk = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert on_disk == {name for name in record if name.startswith("sglang/")}
    for name, (digest, size) in record.items():
        if name.endswith("/RECORD"):
            assert (digest, size) == ("", "")
            continue
        content = (package.parent / name).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (f"sha256={expected}", str(len(content))) == (digest, size)


@pytest.mark.parametrize("editable", [False, True])
def test_the_interpreter_finds_the_engine_and_its_version(tmp_path, editable):
    """Import and metadata work from any directory; there is no pip to pay for."""
    python = build_site(tmp_path, python=sys.executable, editable=editable)
    code = (
        "import sglang, importlib.metadata as m; print(sglang.__file__); print(m.version('sglang'), sglang.__version__)"
    )
    file, versions = run(python, code, "/").splitlines()
    assert f"{VERSION} {VERSION}" == versions
    assert str(package_directory(python) / "__init__.py") == file
    assert not (python.parent / "pip").exists()


def test_an_editable_install_lies_in_a_clean_git_tree_with_one_commit(tmp_path):
    """HEAD holds exactly what is there; RECORD lists no file of the package."""
    python = build_site(tmp_path, python=sys.executable, editable=True)
    source = tmp_path / "sglang-source"

    def git(*words):
        return subprocess.run(["git", "-C", source, *words], check=True, capture_output=True, text=True).stdout

    assert "1" == git("rev-list", "--count", "HEAD").strip()
    assert "" == git("status", "--porcelain")
    run(python, "import sglang.srt.speculative.eagle_worker", "/")
    assert "" == git("status", "--porcelain"), "bytecode must not show as a change"
    purelib = next(tmp_path.glob("ml-env/lib/python*/site-packages"))
    record = record_of(purelib)
    assert [] == [name for name in record if name.startswith("sglang/")]
    origin = json.loads((purelib / f"sglang-{VERSION}.dist-info" / "direct_url.json").read_text())
    assert origin == {"url": (source / "python").as_uri(), "dir_info": {"editable": True}}


def test_guest_code_is_python_3_8():
    """Engine and patches run on the oldest interpreter that a host may have."""
    files = [*standin_source().rglob("*.py"), *patches_source().rglob("*.py")]
    assert len(files) > 10
    for path in files:
        ast.parse(path.read_text(), str(path), feature_version=(3, 8))
