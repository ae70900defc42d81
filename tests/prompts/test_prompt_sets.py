"""The prompt sets that are shipped: counts, form, and that no prompt is another one in disguise."""

import itertools
import json
import re
from importlib import resources

import pytest

NAMES = ("coding", "agentic")


def lines(name):
    text = resources.files("deployctl").joinpath("prompts", f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def text_of(entry):
    return entry["prompt"] if "prompt" in entry else " ".join(message["content"] for message in entry["messages"])


def shingles(text, size=5):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


@pytest.mark.parametrize("name", NAMES)
def test_64_prompts_of_useful_length(name):
    """As many as the highest level of a usual sweep, each long enough to be real work and short enough to repeat."""
    entries = lines(name)
    assert 64 == len(entries)
    lengths = [len(text_of(entry).split()) for entry in entries]
    assert 60 <= min(lengths)
    assert max(lengths) <= 400
    assert max(lengths) - min(lengths) > 100


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_repeats_another(name):
    """Near-duplicates would be answered from the prefix cache: of any two, less than 5 % of the phrases are shared."""
    found = [shingles(text_of(entry)) for entry in lines(name)]
    worst = max(len(one & other) / min(len(one), len(other)) for one, other in itertools.combinations(found, 2))
    assert worst < 0.05


def test_coding_prompts_are_about_code():
    """One message each, with code of the language they are about; no language rules the set."""
    fences = []
    for entry in lines("coding"):
        assert ["prompt"] == list(entry)
        assert entry["prompt"] == entry["prompt"].strip()
        assert entry["prompt"].count("```") % 2 == 0
        fences.append(re.findall(r"^```(\w*)$", entry["prompt"], re.MULTILINE)[::2])
    assert all(fences)
    languages = [found[0] for found in fences]
    assert len(set(languages)) >= 25
    assert max(languages.count(language) for language in languages) <= 16


def test_agentic_prompts_are_conversations_that_await_an_answer():
    """System, then user and assistant by turns, ending with the user's: every chat template accepts that."""
    lengths = []
    for entry in lines("agentic"):
        assert ["messages"] == list(entry)
        roles = [message["role"] for message in entry["messages"]]
        assert all(set(message) == {"role", "content"} for message in entry["messages"])
        assert all(message["content"].strip() == message["content"] != "" for message in entry["messages"])
        assert ["system", *itertools.islice(itertools.cycle(["user", "assistant"]), len(roles) - 1)] == roles
        assert "user" == roles[-1]
        lengths.append(len(roles))
    assert 4 <= min(lengths)
    assert max(lengths) <= 8
    assert len(set(lengths)) >= 3
