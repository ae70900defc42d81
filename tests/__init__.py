"""Tests. A package so that `python -m tests.gpu` finds this one, whatever else is installed under the name."""
