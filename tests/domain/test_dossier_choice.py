"""Which attempts a report means, and what came of each."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl import yamlconf
from deployctl.domain import hosts_yaml
from deployctl.domain.dossier import Verdict, chosen, parse_wanted, verdict_of
from deployctl.errors import UsageError
from deployctl.workflows import report


def told(*attempts):
    releases = [{"number": number, "tree": str(number)} for number in (1, 2)]
    return {
        "attempts": [{"attempt": n, "log_tag": tag, "tree": tree} for n, tag, tree in attempts],
        "releases": releases,
    }


HOSTS = {"a": told((1, "base", "1"), (2, "7", "2"), (3, "t5-6", "2")), "b": told((1, "base", "1"), (6, "v3", "1"))}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("1", {"a": [1], "b": [1]}),
        ("b:1", {"a": [], "b": [1]}),
        ("2-6", {"a": [2, 3], "b": [6]}),
        ("7", {"a": [2], "b": []}),
        ("t5-6, v3", {"a": [3], "b": [6]}),
        ("a:base,b:2-9", {"a": [1], "b": [6]}),
    ],
)
def test_entries_mean_attempts(words, meant):
    """Numbers, ranges, tags (of digits or with a dash, too), and hosts before any of them."""
    found = chosen(HOSTS, parse_wanted(words))
    assert meant == {host: [one["attempt"] for one in dossier["attempts"]] for host, dossier in found.items()}


def test_releases_follow_their_attempts():
    """Only those that a chosen attempt ran; all without a choice."""
    found = chosen(HOSTS, parse_wanted("a:1"))
    assert [[1], []] == [[one["number"] for one in found[host]["releases"]] for host in "ab"]
    assert HOSTS == chosen(HOSTS, None)


@pytest.mark.parametrize("words", ["9", "b:7", "c:1", "v33"])
def test_what_means_nothing_lists_what_there_is(words):
    """An error that names the entry and all hosts' attempts."""
    with pytest.raises(UsageError) as caught:
        chosen(HOSTS, parse_wanted(f"1,{words}"))
    assert words in caught.value.message
    assert "a: 1 (base), 2 (7), 3 (t5-6); b: 1 (base), 6 (v3)" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        chosen({"a": told()}, parse_wanted("1"))
    assert "attempts: none" == caught.value.hint


@given(st.text(alphabet="0123456789-,:ab ", max_size=12))
def test_any_text_is_read_or_refused(words):
    """Nothing but a UsageError comes out of what somebody types."""
    try:
        entries = parse_wanted(words)
    except UsageError as error:
        assert error.hint
    else:
        assert len(words.split(",")) == len(entries)


@pytest.mark.parametrize(
    ("attempt", "words", "kind"),
    [
        ({"state": "crashed", "ready_seconds": 9.0}, "crashed serving", "bad"),
        ({"state": "crashed", "ready_seconds": None}, "crashed loading", "bad"),
        ({"state": "ready", "ready_seconds": 9.0, "smoke": {"problem": None}}, "ready", "good"),
        ({"state": "stopped", "ready_seconds": 9.0}, "served", "good"),
        ({"state": "stopped", "ready_seconds": 9.0, "smoke": {"problem": "empty"}}, "smoke failed", "doubtful"),
        ({"state": "smoke_failed", "ready_seconds": 9.0}, "smoke failed", "doubtful"),
        ({"state": "stopped", "ready_seconds": None}, "stopped loading", "open"),
        ({"state": "timeout"}, "not ready in time", "doubtful"),
        ({"state": "loading"}, "loading", "open"),
        ({"state": "unknown"}, "unknown", "open"),
    ],
)
def test_verdicts(attempt, words, kind):
    """A stop takes nothing away from what the server had come to before."""
    assert Verdict(words=words, kind=kind) == verdict_of(attempt)


def test_a_host_that_an_attempt_names_is_asked():
    """Beside those of --host, or alone where every wanted attempt names its own; a name that is none is refused."""
    text = b"hosts: {a: {address: 1.1.1.1}, b: {address: 1.1.1.2}}\ngroups: {default: [a]}\n"
    inventory = hosts_yaml.decode(yamlconf.parse(text, "hosts.yaml"), Path("hosts.yaml"))

    def asked(words, *selectors):
        wanted = parse_wanted(words) if words else None
        return [host.name for host in report.hosts_of(inventory, wanted, selectors)]

    assert [["a"], ["a"], ["b"], ["a", "b"], ["a", "b"], ["b"]] == [
        asked(None),
        asked("1"),
        asked("b:1"),
        asked("1,b:1"),
        asked("b:1", "a"),
        asked("b:1,b:t"),
    ]
    with pytest.raises(UsageError):
        asked("nosuch:1")
