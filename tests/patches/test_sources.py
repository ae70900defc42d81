"""The generated scripts are what their sources make, and the guards know every supported wheel."""

import csv
import io
import json
import subprocess
import sys
import zipfile

import pytest
from conftest import wheel_of
from pipeline import PROJECT

from deployctl.domain import patch as patches

SOURCES = PROJECT / "patches" / "dynamic_spec" / "src"
SUPPORTED = {
    "v4": ("0.5.9", "0.5.10", "0.5.11", "0.5.12"),
    "v5": ("0.5.14", "0.5.18", "0.5.23"),
}


def test_generated_scripts_are_up_to_date():
    """`tools/build_patches.py --check` says so."""
    build = [sys.executable, str(PROJECT / "tools" / "build_patches.py"), "--check"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_sources_are_no_patches():
    """Discovery finds the five scripts and nothing below src/."""
    found = [name for name in patches.discover(PROJECT) if name.startswith("dynamic_spec/")]
    assert [f"dynamic_spec/v{number}" for number in range(1, 6)] == found


@pytest.mark.parametrize(
    ("patch", "version"), [(patch, version) for patch, versions in SUPPORTED.items() for version in versions]
)
def test_the_guard_knows_each_wheel(patch, version):
    """Every file it looks at has the hash that the wheel's RECORD holds, and every function the hash of its lines."""
    sys.path.insert(0, str(SOURCES))
    import editing

    known = json.loads((SOURCES / "known.json").read_text())[patch]
    with zipfile.ZipFile(wheel_of(version)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        record = {row[0]: row[1] for row in csv.reader(io.StringIO(wheel.read(name).decode())) if len(row) > 1}
        looked_at = 0
        for path, facts in known.items():
            if f"sglang/{path}" not in record:
                assert path == "srt/arg_groups/fields/spec.py"
                continue
            looked_at += 1
            assert record[f"sglang/{path}"].removeprefix("sha256=") in facts["files"]
            text = wheel.read(f"sglang/{path}").decode()
            assert record[f"sglang/{path}"] == "sha256=" + editing.record_hash(text)
            found = editing.definitions(text)
            for function, hashes in facts["functions"].items():
                assert found[function][0] in hashes
    assert looked_at >= 3


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4", "v5"])
def test_metadata(version):
    """The failed attempts say what they end in; the others do not, and each is for its versions alone."""
    metadata = patches.load(f"dynamic_spec/{version}", PROJECT).metadata
    assert (version in ("v1", "v2", "v3")) == bool(metadata.known_bad)
    assert metadata.versions == (">=0.5.14,<0.5.24" if version == "v5" else ">=0.5.9,<0.5.13")
    assert metadata.package == "sglang"
    assert metadata.targets
    assert metadata.verify
