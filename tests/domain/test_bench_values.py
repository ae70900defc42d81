"""Sweeps, prompt files and records as values; when two benches are alike, and who wins where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl.domain import hosts_yaml
from deployctl.domain.bench import (
    DEFAULT_SWEEP,
    Level,
    Record,
    Spread,
    crossover,
    parse_sweep,
    request_of,
    unlike,
)
from deployctl.domain.prompts import load_prompts, read_prompts
from deployctl.domain.report import HostReport, Report
from deployctl.errors import ConfigError, UsageError
from deployctl.workflows.bench import without_ranks

TURN = {"role": "user", "content": "Sort this list"}


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=64, unique=True))
def test_a_sweep_is_its_numbers_in_their_order(levels):
    """Whatever blanks stand around them."""
    assert tuple(levels) == parse_sweep(" , ".join(str(level) for level in levels))


@pytest.mark.parametrize(
    "text", ["", "1,", "0", "4097", "1,2,1", "a", "-1", "1.5", "²", ",".join(map(str, range(1, 66)))]
)
def test_what_is_no_sweep_is_refused_with_an_example(text):
    """And never half understood."""
    with pytest.raises(UsageError) as told:
        parse_sweep(text)
    assert "--sweep 1,2,4" in told.value.hint


def test_a_playbook_may_ask_for_the_usual_sweep():
    """`bench: true`."""
    assert DEFAULT_SWEEP == parse_sweep("true")


def test_prompts_and_messages_become_one_shape():
    """The same prompts are the same set, however they are written; blank lines do not count."""
    short = read_prompts(
        b'{"prompt": "Sort this list"}\n\n{"messages": [%s]}' % json.dumps(TURN).encode(), "a", "a.jsonl"
    )
    long = read_prompts(
        json.dumps({"messages": [TURN]}).encode() + b"\n" + b'{"prompt":"Sort this list"}\r\n', "b", "b"
    )
    assert (2, short.content) == (short.count, long.content)
    assert short.sha256 == long.sha256
    assert {"name": "a", "sha256": short.sha256, "count": 2} == short.as_request()
    for line in short.content.splitlines():
        assert {"messages": [TURN]} == json.loads(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no JSON"),
        ("\udcff", "is no JSON"),
        ("[]", "should be an object"),
        ("{}", "needs `prompt` or `messages`"),
        ('{"prompt": "a b", "messages": []}', "has both"),
        ('{"prompt": "a b", "extra": 1}', "unknown key 'extra'"),
        ('{"prompt": 5}', "a text of two words"),
        ('{"prompt": "one"}', "a text of two words"),
        ('{"messages": []}', "a list of turns"),
        ('{"messages": "hello"}', "a list of turns"),
        ('{"messages": [{"role": "user"}]}', "turn 1 should hold"),
        ('{"messages": [{"role": "user", "content": "x", "name": "y"}]}', "turn 1 should hold"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "role 'boss' is none of"),
        ('{"messages": [{"role": "user", "content": " "}]}', "should be a text"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "the last turn"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_line(line, said):
    """And what it should have been is the hint."""
    content = b'{"prompt": "good one"}\n' + line.encode("utf-8", "surrogateescape") + b"\n"
    with pytest.raises(ConfigError) as told:
        read_prompts(content, "own", "own.jsonl")
    assert told.value.message.startswith("own.jsonl:2: ")
    assert said in told.value.message
    assert '{"prompt": "..."}' in told.value.hint


def test_a_byte_order_mark_is_no_text():
    """As editors of Windows write it before the first line."""
    row = b'{"prompt": "two words"}\n'
    assert (
        read_prompts(row, "own", "own.jsonl").content == read_prompts(b"\xef\xbb\xbf" + row, "own", "own.jsonl").content
    )


def test_prompts_are_found_by_name_beside_hosts_yaml_or_where_they_are(tmp_path):
    """The sets that ship, a file beside hosts.yaml, a path; what is not there is told the nearest name."""
    for name in ("coding", "agentic"):
        assert (name, 64) == (load_prompts(name, tmp_path).name, load_prompts(name, tmp_path).count)
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "good one"}\n')
    assert load_prompts("own.jsonl", tmp_path) == load_prompts(str(path), tmp_path.parent)
    with pytest.raises(UsageError) as told:
        load_prompts("agentik", tmp_path)
    assert "agentic" in told.value.hint
    with pytest.raises(UsageError) as told:
        load_prompts("zzz", tmp_path)
    assert "coding, agentic" in told.value.hint
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts("own.jsonl", tmp_path)
    with open(path, "wb") as out:
        out.truncate((64 << 20) + 1)
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        load_prompts("own.jsonl", tmp_path)


def test_a_request_has_its_defaults_and_its_bounds(tmp_path):
    """What nobody says is usual; what cannot be is refused by the option's name."""
    asked = request_of(root=tmp_path).as_request()
    prompts = asked.pop("prompts")
    assert ("coding", 64) == (prompts["name"], prompts["count"])
    levels = list(DEFAULT_SWEEP)
    usual = {"levels": levels, "max_tokens": 256, "requests_per_level": None, "seed": 1, "timeout_s": 600.0}
    assert usual == asked
    own = request_of(root=tmp_path, sweep=(2, 1), max_tokens=4, requests_per_level=2, seed=0, timeout_s=1.0)
    assert ((2, 1), 4, 2, 0) == (own.levels, own.max_tokens, own.requests_per_level, own.seed)
    for options, said in (
        ({"max_tokens": 3}, "--max-tokens is 3"),
        ({"requests_per_level": 0}, "--requests-per-level is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**32}, "--seed is"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"sweep": "1,8", "requests_per_level": 7}, "7 requests are never 8 at once"),
    ):
        with pytest.raises(UsageError, match=said):
            request_of(root=tmp_path, **options)


def record(tag="t1", rates=None, **changes):
    """A record as the host keeps it; `rates` are output tokens per second by concurrency."""
    spread = {"mean": 2.0, "p50": 1.0, "p90": 3.0, "p99": None}
    value = {
        "bench": 1,
        "attempt": 7,
        "log_tag": tag,
        "started": "2026-01-31T12:00:00Z",
        "ended": None,
        "by": "ann@example.org",
        "state": "complete",
        "generator": {"name": "sglang.bench_serving", "version": "0.5.12"},
        "load": {"prompts": {"name": "coding", "sha256": "aa", "count": 64}, "max_tokens": 256, "seed": 1},
        "settings": {"engine": "sglang", "engine_version": "0.5.12", "gpus": ["NVIDIA H200"] * 2},
        "levels": [
            {
                "concurrency": level,
                "sent": 16,
                "completed": 16,
                "errors": [],
                "output_tok_per_s": rate,
                "duration_s": float("nan"),
                "ttft_ms": spread,
                "later": "field",
            }
            for level, rate in (rates or {1: 100.0}).items()
        ],
        "crash": None,
        "warnings": ["slow"],
    }
    for path, new in changes.items():
        part = value
        *parents, last = path.split("__")
        for key in parents:
            part = part[key]
        part[last] = new
    return Record.decode(value)


def test_a_record_is_decoded_and_what_is_not_known_is_none():
    """Not a number is no number; a field of a later version is no error."""
    one = record()
    level = one.levels[0]
    assert (100.0, None, None) == (level.output_tok_per_s, level.duration_s, level.accept_length)
    assert Spread(mean=2.0, p50=1.0, p90=3.0, p99=None) == level.ttft_ms
    assert Spread() == level.tpot_ms
    assert ("slow",) == one.warnings
    assert [1] == list(one.measured)
    bad = Level.decode({"concurrency": 4, "sent": 16, "completed": 15, "errors": ["x"], "problem": "1 of 16 failed"})
    assert not bad.good
    assert {} == record(levels=[{"concurrency": 4, "sent": 16, "completed": 15}]).measured


def test_like_and_unlike():
    """Each difference that is not the patch's is one sentence; what one does not tell is not held against it."""
    assert [] == unlike(record(), record("t2", {1: 900.0}))
    assert [] == unlike(record(), record(settings__engine_version=None))
    for path, new, said in (
        ("load__seed", 2, "seed: 1 against 2"),
        ("load__max_tokens", 64, "max tokens: 256 against 64"),
        ("load__requests_per_level", 32, "requests per level: 4 for each place against 32"),
        ("load__prompts", {"name": "agentic", "sha256": "bb"}, "prompts: coding against agentic"),
        ("load__prompts", {"name": "coding", "sha256": "bb"}, "both are called coding, but their texts differ"),
        ("settings__engine_version", "0.5.9", "engine version: 0.5.12 against 0.5.9"),
        ("settings__gpus", ["NVIDIA B200"], "GPUs: 2 x NVIDIA H200 against 1 x NVIDIA B200"),
        ("generator__name", "guidellm", "load generator: sglang.bench_serving against guidellm"),
    ):
        found = unlike(record(), record(**{path: new}))
        assert (1, True) == (len(found), said in found[0]), found
    a, b = record(settings__disable_overlap_schedule=True), record(settings__disable_overlap_schedule=False)
    assert ["overlap schedule: off against on"] == unlike(a, b)
    a, b = record(settings__max_running_requests=48), record(settings__max_running_requests=512)
    assert [
        "max_running_requests: 48 against 512 (48 unless set, with speculation): above the smaller one a queue is measured"
    ] == unlike(a, b)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            {1: 200, 2: 300, 64: 354},
            {1: 100, 2: 250, 64: 773},
            ["eagle wins up to C=2, 2.00x at C=1", "base wins from C=64 on, 2.18x at C=64"],
        ),
        ({1: 120, 8: 240}, {1: 100, 8: 200}, ["eagle wins at every concurrency, 1.20x at C=1"]),
        ({4: 120}, {4: 240}, ["base wins at C=4, 2.00x at C=4"]),
        ({1: 100, 2: 101}, {1: 101, 2: 100}, ["eagle and base are even at every concurrency"]),
        (
            {1: 200, 2: 100, 4: 50, 8: 100},
            {1: 100, 2: 100, 4: 100, 8: 50},
            [
                "eagle wins up to C=1, 2.00x at C=1",
                "eagle and base are even at C=2",
                "base wins at C=4, 2.00x at C=4",
                "eagle wins from C=8 on, 2.00x at C=8",
            ],
        ),
        ({1: 100}, {2: 100}, ["no concurrency was measured in both"]),
        ({1: None, 2: 0}, {1: 100, 2: 5}, ["no concurrency was measured in both"]),
    ],
)
def test_who_wins_where(a, b, said):
    """By output tokens per second, at concurrencies that both have measured."""
    assert said == crossover(record("eagle", a), record("base", b))


def test_names_of_a_crossover_may_be_given():
    """Two attempts may bear one tag."""
    assert ["7 wins at C=1, 2.00x at C=1"] == crossover(record("t", {1: 2.0}), record("t", {1: 1.0}), ("7", "8"))


def test_ranks_beside_a_rank_that_was_measured_are_no_failures():
    """A group that serves one model is measured at its rank 0; a group without one is told so."""
    first = HostReport(name="a", status="complete", fields={"bench": {}})
    other = HostReport(name="b", status="failed", exit_code=2, error={"kind": "not-rank-0", "message": "m", "hint": ""})
    both = without_ranks(Report(command="bench", hosts=(first, other)))
    assert [("complete", 0, None), ("rank", 0, None)] == [(one.status, one.exit_code, one.error) for one in both.hosts]
    alone = Report(command="bench", hosts=(other,))
    assert alone == without_ranks(alone)


def test_a_profile_names_the_interpreter_of_its_load_generator(tmp_path):
    """`bench: {python: ...}`; without it there is none of its own; an empty one is told what it is for."""
    text = "hosts: {h: {}}\nprofiles:\n  p:\n    command: [vllm, serve]\n    args: {port: 8000}\n"
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    assert hosts_yaml.load(path).profile("p").bench_python is None
    path.write_text(text + "    bench: {python: ~/bench-env/bin/python}\n")
    assert "~/bench-env/bin/python" == hosts_yaml.load(path).profile("p").bench_python
    for wrong, said in (("{}", "names no interpreter"), ("{pyton: x}", "did you mean 'python'")):
        path.write_text(text + f"    bench: {wrong}\n")
        with pytest.raises(ConfigError) as told:
            hosts_yaml.load(path)
        assert said in f"{told.value.message} {told.value.hint}"
        assert ":6 profiles.p.bench" in told.value.message
