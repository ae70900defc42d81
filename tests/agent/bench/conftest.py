"""Fixtures: a host of this machine whose stand-in engine is ready, and prompts to send it."""

import sys
from pathlib import Path

import pytest

from deployctl.demo.site import build_site

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
sys.path.insert(0, str(Path(__file__).parent))

from bench_host import BenchHost


@pytest.fixture(scope="session")
def engine_python(tmp_path_factory):
    """An interpreter with the stand-in engine; nobody writes to it."""
    return build_site(tmp_path_factory.mktemp("bench-engine"), python=sys.executable)


@pytest.fixture
def host(tmp_path, engine_python):
    """A host without state; whatever was started on it is ended, and nothing of it may live after that."""
    host = BenchHost(tmp_path, engine_python)
    yield host
    host.end()
