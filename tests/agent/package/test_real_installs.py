"""What pip really leaves: editable installs of both kinds, wheels, user site and virtual environment."""

import subprocess
import sys
from pathlib import Path

import pytest
from installs import git, install_at, write
from pythons import run_agent
from support import FILES, install, make_venv

from deployctl.agent import package


@pytest.fixture(scope="session")
def builder(tmp_path_factory):
    """A virtual environment with pip and a setuptools that builds wheels by itself."""
    root = tmp_path_factory.mktemp("builder") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    subprocess.run([root / "bin/pip", "install", "-q", "-U", "setuptools>=77"], check=True)
    return root / "bin/python"


def project(folder, layout):
    """A project as engines have it; `layout` is what setuptools is told about its packages."""
    write(folder / "python/fakesgl")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "fakesgl"\nversion = "1.2.3"\n[tool.setuptools]\n{layout}\n'
    )
    return folder


LAYOUTS = {
    "path": 'package-dir = {"" = "python"}\npackages.find.where = ["python"]',
    "finder": 'package-dir = {"fakesgl" = "python/fakesgl"}\npackages = ["fakesgl", "fakesgl.srt"]',
}
ANSWER = """
from deployctl_agent import package
def act():
    found = package.locate(context)
    return [found.kind, found.directory, found.version, found.git_root, sorted(found.record or {})]
answer = attempt(act)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("under_git", [True, False])
def test_real_editable_installs(builder, tmp_path, layout, under_git):
    """pip install -e, by a .pth with the path and by a finder: the source tree, with and without git. A folder of the
    package's name in the home directory hides what a finder finds, and that is said.
    """
    home = tmp_path / "home"
    home.mkdir()
    folder = project(tmp_path / "source tree", LAYOUTS[layout])
    if under_git:
        git(tmp_path, "init", "-q", str(folder))
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", "base")
    pip = [str(builder), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "--no-build-isolation", "--no-index", "-e", str(folder)], check=True)
    try:
        expected = ["editable" if under_git else "plain", f"{folder}/python/fakesgl", "1.2.3"]
        assert [*expected, str(folder) if under_git else None, []] == run_agent(builder, ANSWER, home)
        (home / "fakesgl").mkdir()
        answer = run_agent(builder, ANSWER, home)
        if layout == "path":
            assert expected == answer[:3]
        else:
            assert "package-shadowed" == answer["kind"]
            assert f"it hides {folder}/python/fakesgl" in answer["hint"]
    finally:
        subprocess.run([*pip, "uninstall", "-q", "-y", "fakesgl"], check=True)


def test_real_wheel(builder, tmp_path):
    """pip install of a built wheel: every file of the package stands in its RECORD with its hash."""
    home = tmp_path / "home"
    home.mkdir()
    folder = project(tmp_path / "source", LAYOUTS["path"] + '\npackage-data = {"*" = ["*.json"]}')
    pip = [str(builder), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "--no-build-isolation", "--no-index", str(folder)], check=True)
    try:
        kind, directory, version, root, record = run_agent(builder, ANSWER, home)
        assert ("wheel", "1.2.3", None) == (kind, version, root)
        assert set(FILES) == {path for path in record if not package.is_bytecode(path)}
        assert Path(directory).is_relative_to(builder.parents[1])
    finally:
        subprocess.run([*pip, "uninstall", "-q", "-y", "fakesgl"], check=True)


def test_user_site_and_virtual_environment(tmp_path):
    """The copy in the user's site is not what a virtual environment's interpreter serves, and is what its base does."""
    home = tmp_path / "home"
    user = home / f".local/lib/python3.{sys.version_info[1]}/site-packages"
    user.mkdir(parents=True)
    install_at(user, version="9.9")
    venv = make_venv(tmp_path)
    place = install(venv)
    assert [str(place), "1.2.3"] == run_agent(venv, ANSWER, home)[1:3]
    base = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    assert [str(user / "fakesgl"), "9.9"] == run_agent(base, ANSWER, home)[1:3]


def test_safe_path(tmp_path):
    """With PYTHONSAFEPATH the directory that the server is started in is not on its path."""
    home = tmp_path / "home"
    write(home / "fakesgl")
    venv = make_venv(tmp_path)
    assert str(home / "fakesgl") == run_agent(venv, ANSWER, home)[1]
    assert "package-missing" == run_agent(venv, ANSWER, home, PYTHONSAFEPATH="1")["kind"]
