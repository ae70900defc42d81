"""The test files themselves: pytest imports them by bare name, so two of one name end a run at its collection."""

from collections import Counter
from pathlib import Path


def test_no_two_test_files_share_a_name():
    """A second file of the same name is found here by itself, not by a whole run that cannot be collected."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
