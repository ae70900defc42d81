"""Installations made by hand, as installers leave them, and ways to look for them."""

import base64
import hashlib
import subprocess
import sys

import pytest
from pythons import context_for
from support import FILES

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


def locate(*server_path, name="fakesgl"):
    return package.locate(context_for("/srv/python3", server_path, name))


def failing(*server_path, name="fakesgl"):
    before = list(sys.path)
    with pytest.raises(Failure) as caught:
        locate(*server_path, name=name)
    assert before == sys.path
    assert caught.value.hint
    return caught.value
