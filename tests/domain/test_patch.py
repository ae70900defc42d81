"""Patches: discovery, references, metadata."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl.domain import patch
from deployctl.errors import ConfigError, UsageError

PROJECT = Path(__file__).resolve().parents[2]
BLOCK = """\
# /// deployctl
# package = "sglang"
# versions = ">=0.5.9,<0.5.13"
# targets = ["srt/server_args.py", "srt/new/"]
# verify = ["sglang.srt.server_args"]
# requires = ["base"]
# known_bad = "it crashes"
# timeout = "2m"
# verify_timeout = 30
# ///
"""


def put(root: Path, name: str, content: str | bytes) -> Path:
    path = root / "patches" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_shipped_patches_load():
    """All that the project ships is valid, and the three that failed say so."""
    for reference in patch.discover(PROJECT):
        loaded = patch.load(reference, PROJECT)
        assert loaded.metadata.package == "sglang"
    for version in ("v1", "v2", "v3"):
        assert patch.load(version, PROJECT).metadata.known_bad


def test_metadata_as_the_agent_gets_it(tmp_path):
    """Every key, with its default where it is missing."""
    put(tmp_path, "s/v1.py", BLOCK + "print(1)\n")
    request = patch.load("v1", tmp_path).as_request()
    assert request["ref"] == "s/v1"
    assert request["metadata"] == {
        "package": "sglang",
        "versions": ">=0.5.9,<0.5.13",
        "targets": ["srt/server_args.py", "srt/new/"],
        "verify": ["sglang.srt.server_args"],
        "requires": ["base"],
        "known_bad": "it crashes",
        "timeout_s": 120.0,
        "verify_timeout_s": 30.0,
    }
    put(tmp_path, "s/live.py", "print(1)\n")
    live = patch.load("live", tmp_path)
    assert live.metadata.as_request()["targets"] is None
    assert live.metadata.as_request()["verify"] is None


def test_names_with_spaces_accents_and_shell_characters(tmp_path):
    """They are names like any other."""
    put(tmp_path, "v3 final/Šablony $(x).py", "pass\n")
    assert patch.load("v3 final/Šablony $(x)", tmp_path).version == "Šablony $(x)"


def test_crlf_and_byte_order_mark(tmp_path):
    """A script from another system reads the same, and its bytes are sent as they are."""
    content = b"\xef\xbb\xbf" + (BLOCK + "print(1)\n").replace("\n", "\r\n").encode()
    put(tmp_path, "s/v1.py", content)
    loaded = patch.load("v1", tmp_path)
    assert loaded.metadata.package == "sglang"
    assert loaded.content == content


def test_a_diff_carries_metadata_in_its_preamble_only(tmp_path):
    """What the diff itself adds is content, not metadata."""
    diff = "--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n a\n+# /// deployctl\n"
    put(tmp_path, "s/v1.diff", BLOCK + diff)
    assert patch.load("v1", tmp_path).kind == "diff"
    assert patch.load("v1", tmp_path).metadata.known_bad == "it crashes"
    put(tmp_path, "s/v2.patch", diff.encode() + b"+\xff\n")
    assert patch.load("v2", tmp_path).metadata == patch.Metadata()


@pytest.mark.parametrize(
    ("reference", "text", "hint"),
    [
        ("v9", "unknown patch 'v9'", "did you mean 'v1' or 'v2'?"),
        ("v1", "patch 'v1' is ambiguous", "one of: a/v1, b/v1"),
        ("zzzzzz", "unknown patch 'zzzzzz'", "patches: a/v1, a/v2, b/v1"),
    ],
)
def test_references(tmp_path, reference, text, hint):
    """Unknown and ambiguous references offer what exists."""
    for name in ("a/v1.py", "a/v2.py", "b/v1.py"):
        put(tmp_path, name, "pass\n")
    put(tmp_path, "a/_helper.py", "pass\n")
    put(tmp_path, "a/notes.txt", "x")
    with pytest.raises(UsageError) as caught:
        patch.load(reference, tmp_path)
    assert caught.value.message == text
    assert caught.value.hint == hint or reference == "v9"
    assert patch.resolve("patches/a/v2.py", patch.discover(tmp_path)) == "a/v2"


def test_no_patches_and_two_of_one_name(tmp_path):
    """Nothing there, and two files that are one reference."""
    with pytest.raises(UsageError, match="there are none"):
        patch.load("v1", tmp_path)
    put(tmp_path, "a/v1.py", "pass\n")
    put(tmp_path, "a/v1.diff", "")
    with pytest.raises(ConfigError, match="are both a/v1"):
        patch.load("v1", tmp_path)
    put(tmp_path, "-a/v1.py", "pass\n")
    (tmp_path / "patches/a/v1.diff").unlink()
    with pytest.raises(UsageError, match="begins with a dash"):
        patch.load("-a/v1", tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# /// deployctl\n# package = 1\n# ///\n", ":2 package: should be text in quotes, not 1"),
        ("# /// deployctl\n# pakage = 'x'\n# ///\n", ":2 pakage: unknown key"),
        ("# /// deployctl\n# targets = 'x'\n# ///\n", ":2 targets: should be a list of texts"),
        ("# /// deployctl\n# targets = ['../x']\n# ///\n", ":2 targets: '../x' is not a path inside the package"),
        ("# /// deployctl\n# targets = ['/x']\n# ///\n", ":2 targets: '/x' is not a path inside the package"),
        ("# /// deployctl\n# targets = []\n# ///\n", ":2 targets: is empty"),
        ("# /// deployctl\n# versions = 'new'\n# ///\n", ":2 versions: Invalid specifier: 'new'"),
        ("# /// deployctl\n# package = 'a-b'\n# ///\n", ":2 package: 'a-b' is not the name of a package"),
        ("# /// deployctl\n# timeout = 'soon'\n# ///\n", ":2 timeout: should be a duration such as"),
        ("# /// deployctl\n# timeout = true\n# ///\n", ":2 timeout: should be a duration such as"),
        ("# /// deployctl\n# verify = ['-x']\n# ///\n", ":2 verify: '-x' is not a usable name"),
        ("# /// deployctl\n# a = \n# ///\n", ":2 not valid TOML"),
        ("# /// deployctl\nimport x\n", ":2 the metadata block ends without `# ///`"),
        ("# /// deployctl\n# package = 'x'\n", ":1 the metadata block has no closing `# ///`"),
        ("# /// deployctl\n# ///\n# /// deployctl\n# ///\n", ":3 a second `# /// deployctl` block"),
        ("def x(:\n", ":1 syntax error in the patch script"),
        ("a = '\x00'\n", " "),
        (b"a = '\xff'\n", ":1 not UTF-8 text"),
    ],
)
def test_faults_in_a_patch_name_their_line(tmp_path, content, expected):
    """Found before anything is contacted."""
    path = put(tmp_path, "s/v1.py", content)
    with pytest.raises(ConfigError) as caught:
        patch.load("v1", tmp_path)
    assert caught.value.message.startswith(f"{path}{expected}".rstrip())


def test_a_patch_that_cannot_be_read(tmp_path):
    """A dangling link is no patch; a folder of that name neither."""
    (tmp_path / "patches" / "s").mkdir(parents=True)
    (tmp_path / "patches/s/v1.py").symlink_to("/nonexistent")
    (tmp_path / "patches/s/v2.py").mkdir()
    assert patch.discover(tmp_path) == {}


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=120))
def test_any_block_is_metadata_or_a_config_error(body):
    """Arbitrary text between the fences raises nothing else."""
    text = "# /// deployctl\n" + "\n".join("# " + line for line in body.splitlines()) + "\n# ///\n"
    try:
        patch.parse_metadata(text, "p.py", "script")
    except ConfigError as error:
        assert error.message.startswith("p.py:")
