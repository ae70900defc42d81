"""A home directory, a site-packages folder and a git work tree to look in."""

import pytest
from installs import git, write


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
