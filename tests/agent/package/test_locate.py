"""The package is found where the server would import it from, and compared with how it came."""

import importlib.util
import os
import shutil
import sys
import zipfile

from installs import failing, hashes, install_at, locate, write
from support import FILES

from deployctl.agent import package


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
