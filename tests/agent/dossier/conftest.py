"""Fixture: a host to push to and to launch on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving_box import ServingBox


@pytest.fixture
def serving(tmp_path):
    """A host whose servers are ended when the test is over."""
    box = ServingBox(tmp_path)
    yield box
    box.end()
