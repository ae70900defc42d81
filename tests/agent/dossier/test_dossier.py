"""The dossier: attempts, what they ran and what was measured of them, each record by itself."""

import hashlib
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_box import ServingBox
from support import FILES, edit, install, threshold

from deployctl.agent import dossier


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


ARGS = FILES["srt/args.py"]


def test_a_host_that_nobody_used(serving):
    """Nothing launched and nothing pushed: empty lists, the installed version, and no state is made."""
    result = serving.dossier()
    assert ("ok", 0, None) == (result["status"], result["exit"], result["error"])
    assert ("box", "fakesgl", "1.2.3") == (result["host"], result["package"], result["version"])
    assert ([], [], []) == (result["attempts"], result["releases"], result["problems"])
    assert not os.path.exists(serving.root / "state dir")


def test_releases_with_their_files_and_diffs(serving):
    """Each release with what it changes against base, and the diff against the one it was pushed onto."""
    serving.push("a/v1", threshold(5))
    serving.push("n/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n"), transaction="t2")
    base, first, second = serving.dossier()["releases"]
    assert (0, None, [], [], "") == tuple(base[key] for key in ("number", "parent", "patches", "files", "diff"))
    after = ARGS.replace("THRESHOLD = 0", "THRESHOLD = 5")
    assert [{"path": "srt/args.py", "before": sha(ARGS), "after": sha(after)}] == first["files"]
    assert [{"path": "srt/new.py", "before": None, "after": sha("N = 1\n")}] == second["files"][1:]
    assert (["a/v1"], ["a/v1", "n/v1"]) == (first["patches"], second["patches"])
    assert (0, 1) == (first["parent"], second["parent"])
    assert [False, False, True] == [release["current"] for release in (base, first, second)]
    assert "-THRESHOLD = 0\n+THRESHOLD = 5\n" in first["diff"]
    assert "args.py" not in second["diff"]
    assert "--- /dev/null\n+++ b/srt/new.py\n" in second["diff"]
    assert ("ann@example.org", "push", False) == (second["by"], second["command"], second["diff_truncated"])
    assert abs(datetime.fromisoformat(second["at"]) - datetime.now(UTC)).total_seconds() < 120


def test_a_long_diff_is_cut_at_a_line(serving):
    """Not more than 60 kB of one release, whole lines, and said."""
    serving.push(
        "big/v1",
        edit(["srt/big.py"], "(root / 'srt/big.py').write_text(''.join(f'LINE_{n} = {n}\\n' for n in range(9000)))\n"),
    )
    release = serving.dossier()["releases"][1]
    assert release["diff_truncated"]
    assert 59000 < len(release["diff"]) <= 60000
    assert release["diff"].endswith("\n")
    assert release["diff"].splitlines()[-1].startswith("+LINE_")


def test_attempts_in_the_order_asked_for(serving):
    """By number, by tag (the newest of it), by a name that is either; each with what it ran and how it ended."""
    first = serving.launch("base", "--threads", "2", port=4711)
    before = serving.dossier("base")["attempts"][0]
    assert (None, None, "1.2.3") == (before["base"], before["tree"], before["version"])
    serving.push("a/v1", threshold(5))
    serving.launch("patched", env={"HF_TOKEN": "hf_abc", "TOKENIZERS_PARALLELISM": "false"})
    third = serving.launch("patched", "--api-key", "s3cret", "--hf-token=hf_abc")
    serving.ask("stop", attempt=third)
    result = serving.dossier("patched", "1")
    last, base = result["attempts"]
    assert (third, first) == (last["attempt"], base["attempt"])
    assert (1, "1", ["a/v1"], "1.2.3") == tuple(last[key] for key in ("release", "tree", "patches", "version"))
    assert (None, "0@1", [], "1.2.3") == tuple(base[key] for key in ("release", "tree", "patches", "version"))
    assert ("stopped", "loading") == (last["state"], base["state"])
    assert (None, True) == (base["ended"], datetime.fromisoformat(last["ended"]) > datetime.fromisoformat(last["at"]))
    assert ["--threads", "2"] == base["argv"][2:]
    assert ["--api-key", "***", "--hf-token=***"] == last["argv"][2:]
    assert ("eagle3", 4711, 0, 1) == tuple(base[key] for key in ("profile", "port", "rank", "nodes"))
    assert {"1", "0@1"} == {release["tree"] for release in result["releases"]}
    everything = serving.dossier()
    assert [1, 2, 3] == [attempt["attempt"] for attempt in everything["attempts"]]
    assert {"HF_TOKEN": "***", "TOKENIZERS_PARALLELISM": "false"} == everything["attempts"][1]["env"]
    assert "s3cret" not in json.dumps(everything)
    assert "hf_abc" not in json.dumps(everything)
    assert [3, 3] == [
        serving.ask("dossier", attempts=[entry])["attempts"][0]["attempt"]
        for entry in ({"attempt": 3}, {"log_tag": "patched"})
    ]


def test_a_number_goes_before_a_tag_of_digits(serving):
    """A tag may look like a number: the number wins where there is one, the tag can be asked for by its own word."""
    serving.launch("2")
    serving.launch("x")
    serving.launch("17")
    chosen = serving.dossier("2", "17")["attempts"]
    assert [2, 3] == [attempt["attempt"] for attempt in chosen]
    assert 1 == serving.ask("dossier", attempts=[{"log_tag": "2"}])["attempts"][0]["attempt"]


def test_an_unknown_attempt_names_the_nearest(serving):
    """Exit 2 with what was meant, or with all there is."""
    nothing = serving.dossier("t1_eagle")
    assert (2, "unknown-attempt") == (nothing["exit"], nothing["error"]["kind"])
    assert "deployctl launch" in nothing["error"]["hint"]
    serving.launch("t0_base")
    serving.launch("t1_eagle")
    assert "did you mean t1_eagle" in serving.dossier("t1_eagel")["error"]["hint"]
    assert "1 (t0_base), 2 (t1_eagle)" in serving.dossier("9")["error"]["hint"]


def test_benches_and_verdicts_come_along(serving):
    """Benches in the order they were run; a torn one is a problem in its place and hides nothing."""
    number = serving.launch("a")
    for bench in (2, 10, 9):
        serving.record(number, f"bench/{bench}/bench.json", json.dumps({"bench": bench, "levels": []}))
    serving.record(number, "bench/3/bench.json", "{torn")
    serving.record(number, "verdict.json", json.dumps({"state": "ready", "phases": [{"name": "init", "seconds": 1.5}]}))
    result = serving.dossier()
    assert [2, 9, 10] == [bench["bench"] for bench in result["attempts"][0]["benches"]]
    assert [{"name": "init", "seconds": 1.5}] == result["attempts"][0]["phases"]
    (problem,) = result["problems"]
    assert "bench/3/bench.json is damaged" in problem


def test_a_damaged_attempt_hides_no_other(serving):
    """The rest is told; asked for by itself it is exit 2 with the reason."""
    serving.launch("a")
    serving.launch("b")
    serving.record(2, "verdict.json", "{torn")
    result = serving.dossier()
    assert "verdict.json is damaged" in result["problems"][0]
    assert "a" == result["attempts"][0]["log_tag"]
    (serving.root / "state dir" / "attempts" / "2" / "verdict.json").unlink()
    serving.record(1, "spec.json", "{torn")
    result = serving.dossier()
    assert ["b"] == [attempt["log_tag"] for attempt in result["attempts"]]
    assert "damaged" in result["problems"][0]
    refused = serving.dossier("1")
    assert 2 == refused["exit"]
    assert "damaged" in refused["error"]["message"]
    serving.record(2, "spec.json", "{}")
    assert "damaged" in serving.dossier("b")["error"]["message"]
    assert [] == serving.dossier()["attempts"]


def test_contents_of_what_attempts_ran(serving):
    """Every file that any of the chosen releases changes, in each of their trees and in the base; and others asked for."""
    serving.launch("base")
    serving.push("a/v1", threshold(5))
    serving.launch("patched")
    serving.push("n/v1", edit(["srt/new.py"], "(root / 'srt/new.py').write_text('N = 1\\n')\n"), transaction="t2")
    serving.launch("both")
    five = ARGS.replace("THRESHOLD = 0", "THRESHOLD = 5")
    contents = serving.dossier("base", "patched", contents=True)["contents"]
    assert {"0@1": {"srt/args.py": ARGS}, "1": {"srt/args.py": five}} == contents
    contents = serving.dossier("base", "both", contents=True)["contents"]
    assert {"srt/args.py": five, "srt/new.py": "N = 1\n"} == contents["2"]
    assert {"srt/args.py": ARGS, "srt/new.py": None} == contents["0@1"]
    asked = serving.dossier("both", contents=True, paths=["srt/worker.py", "srt/nowhere.py"])["contents"]
    assert (FILES["srt/worker.py"], None) == (asked["2"]["srt/worker.py"], asked["2"]["srt/nowhere.py"])
    assert "contents" not in serving.dossier()


def test_two_installs_of_the_package(serving):
    """Attempts on either version keep their own base, contents and version."""
    serving.push("a/v1", threshold(5))
    serving.launch("old")
    for path in [path for path in serving.package.rglob("*") if path.is_file()]:
        path.unlink()
    for info in serving.package.parent.glob("fakesgl-*.dist-info"):
        for path in info.iterdir():
            path.unlink()
        info.rmdir()
    new = {**FILES, "srt/args.py": ARGS + "# 1.3\n"}
    install(serving.python, new, version="1.3.0")
    assert "pushed" == serving.push("a/v2", threshold(6), transaction="t2")["status"]
    serving.launch("new")
    result = serving.dossier("old", "new", contents=True)
    assert ["1.2.3", "1.3.0"] == [attempt["version"] for attempt in result["attempts"]]
    assert {"0@1", "0@2", "1", "2"} == set(result["contents"])
    assert result["contents"]["0@2"]["srt/args.py"].endswith("# 1.3\n")
    assert "# 1.3" not in result["contents"]["1"]["srt/args.py"]
    pushed = next(release for release in result["releases"] if release["number"] == 2)
    assert "-THRESHOLD = 0\n+THRESHOLD = 6\n" in pushed["diff"]
    assert "1.3.0" == result["version"]


def test_a_push_in_progress_is_read_past(serving):
    """Somebody else's push does not keep anybody from reading."""
    serving.launch("a")
    import fcntl

    (serving.root / "state dir" / "journal.json").write_text("{}")
    handle = os.open(serving.root / "state dir" / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    started = time.monotonic()
    try:
        result = serving.dossier()
    finally:
        os.close(handle)
        (serving.root / "state dir" / "journal.json").unlink()
    assert 1 == len(result["attempts"])
    assert result["push_in_progress"]
    assert time.monotonic() - started < 30


def test_on_the_oldest_interpreter(tmp_path):
    """Python 3.8 tells the same."""
    pythons = sorted((Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions").glob("3.8.*"))
    assert pythons, "python 3.8 is missing: pyenv install 3.8"
    box = ServingBox(tmp_path, str(pythons[-1] / "bin" / "python3"))
    try:
        box.push("a/v1", threshold(5))
        box.launch("a")
        result = box.ask("dossier", attempts=[{"name": "a"}], contents=True)
        assert (["a/v1"], 2, {"1", "0@1"}) == (
            result["attempts"][0]["patches"],
            len(result["releases"]),
            set(result["contents"]),
        )
    finally:
        box.end()


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "x", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--admin-api-key=x"], ["--admin-api-key=***"]),
        (["--api_key", "x"], ["--api_key", "***"]),
        (["--max-total-tokens", "5", "--tokenizer-path", "p"], ["--max-total-tokens", "5", "--tokenizer-path", "p"]),
        (
            ["--speculative-token-map", "p", "--ssl-keyfile", "k"],
            ["--speculative-token-map", "p", "--ssl-keyfile", "k"],
        ),
        (["--ssl-keyfile-password", "x"], ["--ssl-keyfile-password", "***"]),
        (["--api-key"], ["--api-key"]),
    ],
)
def test_secrets_of_a_command_line(argv, shown):
    """Values of secrets are hidden, those of options that only sound like one are not."""
    assert shown == dossier.hidden_options(argv)


@given(
    st.dictionaries(st.sampled_from(["HF_TOKEN", "OPENAI_API_KEY", "DB_PASSWORD", "my_secret"]), st.text(min_size=1))
)
def test_no_value_of_a_secret_variable_is_told(env):
    """Whatever it is."""
    assert {"***"} >= set(dossier.hidden_variables(env).values())


def test_variables_that_are_no_secrets():
    """Counts and switches are settings that a comparison must see."""
    env = {"SGLANG_MAX_TOKENS": "4096", "TOKENIZERS_PARALLELISM": "true", "CUDA_VISIBLE_DEVICES": "0"}
    assert env == dossier.hidden_variables(env)
