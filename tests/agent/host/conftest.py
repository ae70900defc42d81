"""Fixtures: a host with device files, and one with the stand-in engine."""

import sys
from pathlib import Path

import pytest
from gpu_host import GpuHost

from deployctl.demo.site import build_site

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from launch_host import LaunchHost


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A device file, shims of the tools, and no server; holders that the test starts are ended."""
    host = GpuHost(tmp_path, monkeypatch)
    yield host
    host.end()


@pytest.fixture(scope="session")
def engine_python(tmp_path_factory):
    """An interpreter with the stand-in engine; nobody writes to it."""
    return build_site(tmp_path_factory.mktemp("engine"), python=sys.executable)


@pytest.fixture
def host(tmp_path, engine_python):
    """A host whose servers are ended when the test is over."""
    host = LaunchHost(tmp_path, engine_python)
    yield host
    host.end()
