"""The package is found where the server would import it from, and compared with how it came."""

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pythons import context_for, run_agent
from support import FILES, install, make_venv

from deployctl.agent import package
from deployctl.agent.failure import Failure


def write(folder, files=FILES):
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def install_at(site, files=FILES, name="fakesgl", project=None, version="1.2.3"):
    """What a wheel leaves in a site-packages folder."""
    write(site / name, files)
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name}/{path},sha256={digest},{len(text)}")
    info = site / f"{project or name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project or name}\nVersion: {version}\n\nVersion: no\n"
    )
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return site / name


def hashes(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and ".git" not in path.parts
    }


def git(folder, *words):
    identity = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home directory, with a blank and a letter beyond ASCII in its path."""
    home = tmp_path / "home of Šárka"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def site(tmp_path):
    """An empty site-packages folder."""
    site = tmp_path / "lib/site packages"
    site.mkdir(parents=True)
    return site


def locate(*server_path, name="fakesgl"):
    return package.locate(context_for("/srv/python3", server_path, name))


def failing(*server_path, name="fakesgl"):
    before = list(sys.path)
    with pytest.raises(Failure) as caught:
        locate(*server_path, name=name)
    assert before == sys.path
    assert caught.value.hint
    return caught.value


def test_wheel(home, site):
    """A wheel's package: its folder, version, hashes by RECORD; nothing is imported."""
    install_at(site, {**FILES, "__init__.py": "raise SystemExit('imported')\n"})
    found = locate(site)
    assert ("fakesgl", str(site / "fakesgl"), "1.2.3", "wheel", None, ()) == (
        found.name,
        found.directory,
        found.version,
        found.kind,
        found.git_root,
        found.warnings,
    )
    assert hashes(site / "fakesgl") == found.record
    assert "fakesgl" not in sys.modules


def test_differing_from_the_record(home, site):
    """Changed, missing and added files are named, bytecode is not; a row without a hash vouches for any content."""
    place = install_at(site)
    record = next(site.glob("*.dist-info")) / "RECORD"
    record.write_text(
        record.read_text() + "fakesgl/gen.py,,\nfakesgl/__pycache__/x.cpython-311.pyc,,\nfakesgl/odd.py,md5=xx,1\n"
        "fakesgl/broken.py,sha256=abcde,1\n"
    )
    for name in ("gen.py", "odd.py", "broken.py"):
        (place / name).write_text("generated\n")
    found = locate(site)
    assert [] == package.differing_from_origin(found, hashes(place))
    (place / "srt/args.py").write_text("edited\n")
    (place / "srt/mine.py").write_text("new\n")
    (place / "srt/data.json").unlink()
    (place / "gen.py").unlink()
    expected = ["gen.py", "srt/args.py", "srt/data.json", "srt/mine.py"]
    assert expected == package.differing_from_origin(found, hashes(place))


def test_a_plug_in_of_another_project_is_no_edit(home, site):
    """Files that another wheel put into the package are as they came, as long as they are so."""
    place = install_at(site)
    install_at(site, {"plugins/x.py": "x = 1\n"}, project="another_project")
    found = locate(site)
    assert ("wheel", "1.2.3") == (found.kind, found.version)
    assert [] == package.differing_from_origin(found, hashes(place))
    (place / "plugins/x.py").write_text("x = 2\n")
    assert ["plugins/x.py"] == package.differing_from_origin(found, hashes(place))


def test_the_project_may_have_another_name(home, site):
    """The package of a project whose name is not its import name is found by the RECORD."""
    install_at(site, project="fake_engine_kernel", version="3.0")
    install_at(site, {"__init__.py": ""}, name="other", version="9")
    assert ("wheel", "3.0") == (locate(site).kind, locate(site).version)


def test_leftovers_of_an_upgrade(home, site):
    """Of two dist-infos that list the package the one that fits its files is taken, and both are told."""
    install_at(site, {**FILES, "version.py": '__version__ = "1.10.0"\n'}, version="1.10.0")
    install_at(site, version="1.9.0")
    (site / "fakesgl/version.py").write_text('__version__ = "1.10.0"\n')
    found = locate(site)
    assert "1.10.0" == found.version
    (warning,) = found.warnings
    assert "fakesgl-1.9.0.dist-info" in warning
    assert "fakesgl-1.10.0.dist-info fits" in warning


def test_the_fingerprint_tells_a_new_installation(home, site):
    """The same version installed again has another fingerprint; looking twice has not."""
    install_at(site)
    first = locate(site).fingerprint
    assert first == locate(site).fingerprint
    record = next(site.glob("*.dist-info")) / "RECORD"
    content = record.read_bytes()
    record.unlink()
    record.write_bytes(content)
    os.utime(record, ns=(1, record.stat().st_mtime_ns + 1_000_000))
    assert first != locate(site).fingerprint


def test_damaged_metadata_still_has_a_version(home, site):
    """Without METADATA the folder's name says the version; without RECORD the package is plain."""
    install_at(site)
    info = next(site.glob("*.dist-info"))
    (info / "METADATA").write_text("Name: fakesgl\n\n")
    assert ("wheel", "1.2.3") == (locate(site).kind, locate(site).version)
    (info / "RECORD").unlink()
    found = locate(site)
    assert ("plain", "1.2.3", None) == (found.kind, found.version, found.record)
    assert [] == package.differing_from_origin(found, {"anything.py": "0"})
    assert found.fingerprint == locate(site).fingerprint


def test_plain_folder(home, site):
    """A folder that no installer put there: the version from its files, and a warning."""
    write(site / "fakesgl")
    found = locate(site)
    assert ("plain", "1.2.3") == (found.kind, found.version)
    assert ("fakesgl is imported from %s, where no installer put it" % (site / "fakesgl"),) == found.warnings
    (site / "fakesgl/version.py").write_text("from ._version import *\n")
    (site / "fakesgl/_version.py").write_text('__version__: str = "2.0.dev1"\n')
    assert "2.0.dev1" == locate(site).version
    (site / "fakesgl/_version.py").unlink()
    found = locate(site)
    assert "0+unknown" == found.version
    assert "cannot be told" in found.warnings[-1]


def test_the_home_directory_is_where_the_server_starts(home, site):
    """A copy in the home directory is what `python -m` imports: it is the package, and the hidden one is named. The
    hidden one's metadata are not taken for its own.
    """
    install_at(site)
    write(home / "fakesgl", {"__init__.py": "", "version.py": '__version__ = "0.0.1"\n'})
    found = locate(site)
    assert (str(home / "fakesgl"), "plain", "0.0.1") == (found.directory, found.kind, found.version)
    assert any(str(site / "fakesgl") in warning and "also in" in warning for warning in found.warnings)


def test_the_first_on_the_path_serves(home, tmp_path, site):
    """Of a copy on PYTHONPATH or in the user's site and the installed one, the first serves and the other is named."""
    install_at(site)
    user = tmp_path / "user site"
    user.mkdir()
    install_at(user, version="1.0")
    for first, second, version in [(user, site, "1.0"), (site, user, "1.2.3")]:
        found = locate(first, second)
        assert (str(first / "fakesgl"), version) == (found.directory, version)
        assert [f"fakesgl is also in {second}/fakesgl, but {first}/fakesgl is the one that is imported"] == list(
            found.warnings
        )


def test_a_link_to_the_package(home, tmp_path, site):
    """A linked package is its real folder; the wheel beside the link is its origin."""
    install_at(site)
    (tmp_path / "real").mkdir()
    shutil.move(site / "fakesgl", tmp_path / "real/fakesgl")
    (site / "fakesgl").symlink_to(tmp_path / "real/fakesgl")
    found = locate(site)
    assert (str(tmp_path / "real/fakesgl"), "wheel", ()) == (found.directory, found.kind, found.warnings)


def test_the_same_site_under_two_names(home, tmp_path, site):
    """lib64 is a link to lib in virtual environments: one install, no warning."""
    install_at(site)
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    found = locate(tmp_path / "lib64/site packages", site)
    assert (str(site / "fakesgl"), "wheel", ()) == (found.directory, found.kind, found.warnings)


def test_missing(home, site):
    """Not installed: the interpreter is named."""
    failure = failing(site, "/nowhere", "")
    assert ("package-missing", True) == (failure.kind, "/srv/python3" in failure.message)


def test_no_package_name(home, site):
    """A name that no import statement could hold."""
    assert "no import name" in failing(site, name="a.b").message


def test_a_single_module(home, site):
    """A module of that name is no package."""
    (site / "fakesgl.py").write_text("")
    assert str(site / "fakesgl.py") in failing(site).message


def test_a_folder_without_init_alone(home, site):
    """A folder without __init__.py is no package, and where it lies is said."""
    (home / "fakesgl").mkdir()
    (site / "fakesgl").mkdir()
    failure = failing(site)
    assert "package-shadowed" == failure.kind
    assert str(home / "fakesgl") in failure.message
    assert str(site / "fakesgl") in failure.message


def test_a_folder_without_init_before_a_real_package(home, site):
    """A regular package further down the path wins, as it does in Python."""
    (home / "fakesgl").mkdir()
    install_at(site)
    assert str(site / "fakesgl") == locate(site).directory


def test_a_finder_that_fails(home, site, monkeypatch):
    """What a broken finder of an editable install says is handed on."""

    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise RuntimeError("rebuild failed")

    monkeypatch.setattr(sys, "meta_path", [Broken])
    assert "RuntimeError: rebuild failed" in failing(site).message


def test_a_folder_that_hides_an_editable_install(home, site, monkeypatch):
    """A finder is asked after the path: a folder of the package's name in the home directory hides what it finds."""
    place = write(site / "fakesgl")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "fakesgl":
                return None
            return importlib.util.spec_from_file_location(name, place / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert str(place) == locate("/nowhere").directory
    (home / "fakesgl").mkdir()
    assert f"it hides {place}" in failing("/nowhere").hint


def test_inside_a_zip_file(home, tmp_path):
    """A package in a zip file cannot be patched."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("fakesgl/__init__.py", "")
    failure = failing(tmp_path / "all.zip")
    assert ("package-zipped", True) == (failure.kind, str(tmp_path / "all.zip") in failure.message)


def test_a_module_already_imported_is_looked_for_anew(home, site):
    """The interpreter's own modules of that name do not count, and stay."""
    before = sys.modules["json"]
    write(site / "json", {"__init__.py": ""})
    assert str(site / "json") == locate(site, name="json").directory
    assert before is sys.modules["json"]


@pytest.fixture
def tree(tmp_path):
    """A git work tree with the package below `python/`."""
    root = tmp_path / "engine é"
    write(root / "python/fakesgl")
    (root / "README").write_text("x\n")
    (root / ".gitignore").write_text("*.so\n__pycache__/\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "base")
    return root


def test_work_tree(home, tree):
    """A source tree on the path: HEAD is its origin; ignored files and those outside the package do not count."""
    place = tree / "python/fakesgl"
    found = locate(tree / "python")
    assert (str(place), "source", str(tree), "1.2.3") == (found.directory, found.kind, found.git_root, found.version)
    assert [] == package.differing_from_origin(found, hashes(place))
    (place / "srt/args.py").write_text("edited\n")
    (place / "srt/new é.py").write_text("new\n")
    (place / "srt/data.json").unlink()
    (place / "built.so").write_text("")
    (tree / "README").write_text("y\n")
    git(tree, "mv", "python/fakesgl/srt/worker.py", "python/fakesgl/srt/moved.py")
    expected = ["srt/args.py", "srt/data.json", "srt/moved.py", "srt/new é.py", "srt/worker.py"]
    assert expected == package.differing_from_origin(found, hashes(place))
    git(tree, "commit", "-qam", "next")
    assert found.fingerprint != locate(tree / "python").fingerprint


def test_line_ends_that_git_converts_are_no_edit(home, tree):
    """core.autocrlf: CRLF on disk, LF in the repository."""
    git(tree, "config", "core.autocrlf", "true")
    place = tree / "python/fakesgl"
    (place / "srt/args.py").write_bytes((place / "srt/args.py").read_bytes().replace(b"\n", b"\r\n"))
    assert [] == package.differing_from_origin(locate(tree / "python"), hashes(place))


def test_the_work_tree_may_be_the_package(home, tmp_path):
    """The package's folder is the root of the work tree."""
    place = write(tmp_path / "fakesgl")
    git(tmp_path, "init", "-q", str(place))
    git(place, "add", ".")
    git(place, "commit", "-q", "-m", "base")
    (place / "srt/args.py").write_text("edited\n")
    found = locate(tmp_path)
    assert ["srt/args.py"] == package.differing_from_origin(found, hashes(place))


def test_a_legacy_editable_install(home, tree):
    """An egg-info beside the source makes it editable, and says its version."""
    info = tree / "python/fakesgl.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fakesgl\nVersion: 1.2.4.dev0\n")
    found = locate(tree / "python")
    assert ("editable", "1.2.4.dev0") == (found.kind, found.version)


def test_below_a_work_tree_that_does_not_track_it(home, tmp_path):
    """A virtual environment in a home directory under git is not that repository's."""
    git(tmp_path, "init", "-q", str(home))
    (home / "dotfile").write_text("x")
    git(home, "add", "dotfile")
    git(home, "commit", "-q", "-m", "dots")
    write(home / "env/site/fakesgl")
    assert "plain" == locate(home / "env/site").kind


def test_a_work_tree_of_another_user(home, tree):
    """Root may look at a user's tree, which git by itself refuses."""
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert ("source", ()) == (locate(tree / "python").kind, locate(tree / "python").warnings[1:])


def test_a_hooks_environment_leads_nowhere_else(home, tree, monkeypatch):
    """GIT_DIR of a hook does not lead to another repository."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert str(tree) == locate(tree / "python").git_root


def test_git_that_cannot_read(home, tree, monkeypatch):
    """No git, or a broken repository: the package is plain, and that edits go unnoticed is said."""
    found = locate(tree / "python")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        bare = locate(tree / "python")
        with pytest.raises(Failure, match="git cannot compare") as caught:
            package.differing_from_origin(found, {})
        assert "git" == caught.value.kind
    assert "plain" == bare.kind
    assert "edits made before the first push are not noticed" in bare.warnings[-1]
    shutil.rmtree(tree / ".git/objects")
    assert "git cannot read the work tree" in locate(tree / "python").warnings[-1]


def test_git_that_hangs(home, tree, monkeypatch, tmp_path):
    """A git that does not end (a dead network file system) is cut off."""
    fake = tmp_path / "bin/git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(package, "_GIT_DEADLINE_S", 0.2)
    assert "did not end" in locate(tree / "python").warnings[-1]


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
