"""Fixtures for the agent's tests."""

import pytest
from support import Box


@pytest.fixture
def box(tmp_path):
    """A host on this machine with a small package installed."""
    return Box(tmp_path)
