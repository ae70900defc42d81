"""Playbooks are checked completely before their first step."""

import shutil
from pathlib import Path

import pytest

from deployctl.domain import hosts_yaml, playbook
from deployctl.errors import ConfigError, UsageError

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path):
    shutil.copy(PROJECT / "hosts.yaml", tmp_path)
    shutil.copytree(PROJECT / "patches", tmp_path / "patches")
    shutil.copytree(PROJECT / "playbooks", tmp_path / "playbooks")
    return tmp_path


def load(root: Path, text: str, **settings: str) -> playbook.Playbook:
    path = root / "p.yaml"
    path.write_text(text)
    return playbook.load(path, hosts_yaml.load(root / "hosts.yaml"), settings)


@pytest.mark.parametrize("name", ["ab", "find-threshold", "iterate", "baseline", "canary", "recover"])
def test_the_shipped_playbooks(root, name):
    """Each is valid with the shipped inventory and patches."""
    book = playbook.load(playbook.find(name, root), hosts_yaml.load(root / "hosts.yaml"), {})
    assert book.name == name
    assert book.steps


def test_values_are_filled_in_and_keep_their_type(root):
    """`{burst}` may be a number; `--set` wins; doubled braces stay braces."""
    text = (
        "vars: {burst: 16, patch: v3, tag: t1, p: eagle3}\nsteps:\n"
        "  - push: {patch: '{patch}', import: sglang.version, force: true}\n"
        "  - launch: {log_tag: '{tag}-x', burst: '{burst}', timeout: 20m, profile: '{p}', args: [--json, '{{\"a\": 1}}'], host: blackwell-1}\n"
        "  - run: {argv: ['{python}', -V], env: {A: '{tag}'}, timeout: 30s, host: [blackwell-1]}\n"
        "  - pause: {seconds: 1s}\n  - status\non_failure:\n  - logs: {crash: true}\n"
    )
    book = load(root, text, burst="4")
    push, launch, run, pause, status = book.steps
    assert push.args == {"patch": "v3", "import": ["sglang.version"], "force": True}
    assert launch.args["burst"] == 4
    assert launch.args["timeout"] == 1200
    assert launch.args["args"] == ["--json", '{"a": 1}']
    assert launch.args["log_tag"] == "t1-x"
    assert launch.hosts == ("blackwell-1",)
    assert run.args == {"argv": ["{python}", "-V"], "timeout": 30, "env": {"A": "t1"}}
    assert run.title == "run argv={python} -V timeout=30.0 env={'A': 't1'} on blackwell-1"
    assert (pause.args, status.args) == ({"seconds": 1}, {})
    assert [step.name for step in book.on_failure] == ["logs"]
    assert (book.name, dict(book.variables)["burst"]) == ("p", "4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: []\n", ":1 no steps"),
        ("stpes: []\n", ":1 stpes: unknown key"),
        ("steps:\n  - psuh: {patch: v3}\n", ":2 steps[0].psuh: unknown step 'psuh'"),
        ("steps:\n  - nope\n", ":2 steps[0]: unknown step 'nope'"),
        ("steps:\n  - push: {patch: v3}\n    stop: {}\n", ":2 steps[0]: a step is one command"),
        ("steps:\n  - push: {}\n", ":2 steps[0].push: push needs `patch`"),
        ("steps:\n  - push: {patch: v99}\n", ":2 steps[0].push: unknown patch 'v99'"),
        ("steps:\n  - push: {patch: '{x}'}\n", ":2 steps[0].push.patch: unknown variable {x}"),
        ("steps:\n  - launch: {log_tag: a/b}\n", ":2 steps[0].launch.log_tag: log tag 'a/b' cannot name a log"),
        ("steps:\n  - launch: {log_tag: a, profile: x}\n", ":2 steps[0].launch: unknown profile 'x'"),
        ("steps:\n  - launch: {log_tag: a, burst: many}\n", ":2 steps[0].launch.burst: should be a whole number"),
        ("steps:\n  - bench: {sweep: '1,x'}\n", ":2 steps[0].bench.sweep: sweep '1,x': 'x' is not a number"),
        ("steps:\n  - bench: {prompts: codig}\n", ":2 steps[0].bench: no prompts 'codig'"),
        ("steps:\n  - bench: {max_tokens: 2}\n", ":2 steps[0].bench: --max-tokens is 2"),
        ("steps:\n  - launch: {log_tag: a, bench: 0}\n", ":2 steps[0].launch.bench: sweep '0'"),
        ("steps:\n  - launch: {log_tag: a, bench: 1, wait: false}\n", ":2 steps[0].launch: `bench` needs a server"),
        ("steps:\n  - launch: {log_tag: a, prompts: coding}\n", ":2 steps[0].launch: `prompts` are for `bench`"),
        ("steps:\n  - stop: {host: nowhere}\n", ":2 steps[0].stop.host: unknown host 'nowhere'"),
        ("steps:\n  - copy: {source: nope, target: /x}\n", ":2 steps[0].copy: no file 'nope' beside hosts.yaml"),
        ("vars: {e: ~}\nsteps:\n  - push: {patch: '{e}'}\n", ":3 steps[0].push.patch: is empty"),
        ("steps:\n  - push: {patch: 'bad/b1'}\n", ""),
    ],
)
def test_everything_is_checked_first(root, text, expected):
    """Unknown steps, keys, variables, patches, profiles, hosts: file, line, path."""
    bad = root / "patches" / "bad"
    bad.mkdir()
    (bad / "b1.py").write_text("def x(:\n")
    with pytest.raises(ConfigError) as caught:
        load(root, text)
    assert caught.value.message.startswith(f"{root / 'p.yaml'}{expected}" if expected else str(bad))


def test_settings_must_be_variables(root):
    """A misspelt --set is not ignored."""
    with pytest.raises(ConfigError) as caught:
        load(root, "vars: {patch: v3}\nsteps: [status]\n", pach="v1")
    assert caught.value.hint == "did you mean 'patch'?"


def test_finding_playbooks(root, monkeypatch):
    """By path, by name, and the nearest names."""
    assert playbook.find(str(root / "playbooks/iterate.yaml"), root) == root / "playbooks" / "iterate.yaml"
    with pytest.raises(UsageError) as caught:
        playbook.find("itrate", root)
    assert caught.value.hint == "did you mean 'iterate'?"
    with pytest.raises(UsageError) as caught:
        playbook.find("zzz", root)
    assert caught.value.hint == "playbooks: ab, baseline, canary, find-threshold, iterate, recover"


def test_a_file_to_copy(root):
    """A file beside hosts.yaml can be copied."""
    book = load(root, "steps:\n  - copy: {source: hosts.yaml, target: '~/x', mode: '0600'}\n")
    assert book.steps[0].args == {"source": "hosts.yaml", "target": "~/x", "mode": "0600"}


def test_benches_of_a_playbook(root):
    """A step of its own, or with the launch; `bench: true` is the usual sweep; a launch without measures nothing."""
    text = (
        "vars: {sweep: '1,64'}\nsteps:\n  - launch: {log_tag: a, bench: true}\n  - launch: {log_tag: b, bench: '{sweep}'}\n"
        "  - bench: {log_tag: a, sweep: '{sweep}', prompts: agentic, max_tokens: 8, seed: 2, timeout: 1m}\n"
        "  - bench: {}\n  - launch: {log_tag: c}\n"
    )
    book = load(root, text)
    requests = [playbook.bench_request(step, root) for step in book.steps]
    assert [(1, 2, 4, 8, 16, 32, 64), (1, 64), (1, 64), (1, 2, 4, 8, 16, 32, 64)] == [
        one.levels for one in requests[:4]
    ]
    assert ("agentic", 8, 2, 60.0) == (
        requests[2].prompts.name,
        requests[2].max_tokens,
        requests[2].seed,
        requests[2].timeout_s,
    )
    assert requests[4] is None
    assert "bench log_tag=a sweep=1,64 prompts=agentic max_tokens=8 seed=2 timeout=60.0" == book.steps[2].title
