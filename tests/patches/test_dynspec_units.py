"""The parts of dynspec that need no engine: policy, arguments, and v5's configuration."""

import logging
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline import PROJECT

sys.path.insert(0, str(PROJECT / "patches" / "dynamic_spec" / "src"))
import dynspec_config
from dynspec import arguments
from dynspec.arguments import Thresholds
from dynspec.policy import Policy


def make_args(**changes):
    args = SimpleNamespace(
        speculative_disable_batch_threshold=8,
        speculative_resume_batch_threshold=None,
        speculative_algorithm="EAGLE3",
        pp_size=1,
        device="cuda",
        max_running_requests=64,
        disaggregation_mode="null",
    )
    vars(args).update(changes)
    return args


def test_off_above_the_limit_and_on_at_the_resume():
    """Between the two nothing changes."""
    policy = Policy(Thresholds(8, 6))
    sizes = [1, 8, 9, 8, 7, 6, 7, 8, 9, 64, 6]
    assert [False, False, True, True, True, False, False, False, True, True, False] == [
        policy.decide(size) for size in sizes
    ]


@given(
    st.lists(st.integers(1, 80)),
    st.integers(0, 70).flatmap(lambda limit: st.tuples(st.just(limit), st.integers(0, limit))),
)
def test_policy_in_general(sizes, thresholds):
    """Above the limit always off, at most the resume always on, and switches no more often than the load crosses."""
    limit, resume = thresholds
    policy, last = Policy(Thresholds(limit, resume), speaks=False), False
    for size in sizes:
        off = policy.decide(size)
        assert off or size <= limit
        assert not off or size > resume
        assert off == last or size > limit or size <= resume
        last = off


def test_transitions_are_logged_once(caplog):
    """With what crossed what, and after how many steps; ranks that do not speak log nothing."""
    with caplog.at_level(logging.INFO):
        for speaks in (True, False):
            policy = Policy(Thresholds(8, 6), speaks=speaks)
            for size in (1, 2, 9, 9, 9, 5):
                policy.decide(size)
    assert [record.getMessage() for record in caplog.records] == [
        "[dynspec] speculation OFF: batch=9 limit=8 resume=6, after 2 steps",
        "[dynspec] speculation ON: batch=5 limit=8 resume=6, after 3 steps",
    ]


def test_no_flag_no_thresholds():
    """Engines that were never told about it have no such field."""
    assert arguments.thresholds_of(SimpleNamespace()) is None
    arguments.check(SimpleNamespace())
    arguments.check(make_args(speculative_disable_batch_threshold=None, device="cpu", pp_size=2))


def test_resume_is_the_limit_unless_given():
    """Zero counts as given."""
    assert arguments.thresholds_of(make_args()) == (8, 8)
    assert arguments.thresholds_of(make_args(speculative_resume_batch_threshold=0)) == (8, 0)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_what_is_supported_passes(algorithm, caplog):
    """And says nothing."""
    arguments.check(make_args(speculative_algorithm=algorithm, speculative_disable_batch_threshold=0, device="cuda:0"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({name: True}, "--" + name.replace("_", "-")) for name in arguments.REFUSED_SWITCHES),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"speculative_algorithm": None}, "--speculative-algorithm None"),
        ({"speculative_disable_batch_threshold": -1}, "limit -1"),
        ({"speculative_resume_batch_threshold": 9}, "limit 8 with resume 9"),
        ({"speculative_resume_batch_threshold": -1}, "limit 8 with resume -1"),
        ({"pp_size": 2}, "--pipeline-parallel-size"),
        ({"device": "cpu"}, "--device cpu"),
    ],
)
def test_what_is_not_supported_is_refused(changes, named):
    """By name."""
    with pytest.raises(ValueError, match="--speculative-disable-batch-threshold does not work with: ") as caught:
        arguments.check(make_args(**changes))
    assert named in str(caught.value)


def test_all_faults_in_one_message():
    """Nobody wants to load twice to learn of two."""
    with pytest.raises(ValueError, match=r"NGRAM.*; .*--enable-lora.*; .*--device cpu"):
        arguments.check(make_args(speculative_algorithm="NGRAM", enable_lora=True, device="cpu"))


def test_resume_alone_is_refused():
    """It would do nothing."""
    with pytest.raises(ValueError, match="needs --speculative-disable-batch-threshold"):
        arguments.check(make_args(speculative_disable_batch_threshold=None, speculative_resume_batch_threshold=4))


@pytest.mark.parametrize(("most", "warned"), [(8, True), (9, False), (4, True), (None, False)])
def test_a_threshold_that_is_never_exceeded(most, warned, caplog):
    """Under speculation the engine makes --max-running-requests 48: easily overlooked."""
    arguments.check(make_args(max_running_requests=most))
    assert warned == any("is never exceeded" in record.getMessage() for record in caplog.records)


def test_prefill_and_decode_apart_is_told(caplog):
    """Not refused: not tried."""
    arguments.check(make_args(disaggregation_mode="decode"))
    assert any("not tried" in record.getMessage() for record in caplog.records)


def test_configuration_file(tmp_path, monkeypatch):
    """Named by what it says; written whole, also over an older one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = dynspec_config.path_of(8, 3)
    for _ in range(2):
        dynspec_config.write(path, dynspec_config.adaptive_config(8, 3))
    (written,) = (tmp_path / "sglang").iterdir()
    assert str(written) == path
    assert written.read_text() == '{"1": {"candidate_steps": [3]}, "9": {"candidate_steps": [0]}}'
    assert dynspec_config.path_of(9, 3) != path != dynspec_config.path_of(8, 4)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert dynspec_config.path_of(8, 3).startswith(str(tmp_path / "home" / ".cache" / "sglang"))
