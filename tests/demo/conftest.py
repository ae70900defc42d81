"""Fixtures of the demo's tests."""

import sys

import pytest
from demo_engine import Engine

from deployctl.demo.site import build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The interpreter of an environment with the stand-in engine."""
    return build_site(tmp_path_factory.mktemp("site"), python=sys.executable)


@pytest.fixture(scope="module")
def server(site):
    """An engine that works, ready, with speculation."""
    with Engine(site, "--speculative-algorithm", "EAGLE3", "--decode-log-interval", "1") as engine:
        yield engine.wait_ready()
