"""The agent in this process: home and umask as on a host."""

import pytest
from support import Box


@pytest.fixture
def near(box: Box, monkeypatch):
    """A box whose agent runs in this process."""
    for name, value in box.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return box
