"""Options are checked before anything is begun: nothing here has an inventory, let alone a host."""

import json
import subprocess
import sys

import pytest

from deployctl.cli.app import program


def deployctl(*words: str, folder) -> subprocess.CompletedProcess:
    """Run deployctl in a folder without hosts.yaml."""
    return subprocess.run(
        [sys.executable, "-m", "deployctl", *words], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("command", [("launch", "--log-tag", "t"), ("wait",), ("bench",)])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("abc", "should be a duration such as 30s or 15m, not 'abc'"),
        ("-5", "should be a duration such as 30s or 15m, not '-5'"),
        ("0", "should be more than 0 and at most 30d, not 0"),
        ("99999999999h", "should be more than 0 and at most 30d, not 99999999999h"),
    ],
)
def test_a_timeout_that_bounds_nothing_is_a_usage_error(tmp_path, command, text, reason):
    """Exit 2, the option and the reason named, before hosts.yaml is even looked for."""
    result = deployctl(*command, "--timeout", text, folder=tmp_path)
    assert 2 == result.returncode
    assert f"Error: Invalid value for '--timeout': {reason}" == result.stderr.splitlines()[-1]
    told = json.loads(deployctl(*command, "--json", "--timeout", text, folder=tmp_path).stdout)
    assert ("usage", f"deployctl {command[0]} --help") == (told["error"]["kind"], told["error"]["hint"])


def test_every_command_is_listed_and_explains_itself_with_an_example(tmp_path):
    """No room of commands is left out of the program, and `--help` loads none of what the commands work with."""
    shown = deployctl("--help", folder=tmp_path).stdout
    listed = [line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    known = "push rollback status history launch wait smoke logs stop clean play lock audit doctor init demo".split()
    assert [] == [name for name in known if name not in listed]
    for name in known:
        assert "Example: deployctl " in deployctl(name, "--help", folder=tmp_path).stdout, name
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deployctl", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stderr
    heavy = ("paramiko", "yaml", "tenacity", "deployctl.domain", "deployctl.workflows", "deployctl.transport")
    loaded = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "deployctl.cli.app" in loaded
    assert [] == [name for name in heavy if name in loaded]


@pytest.mark.parametrize("command", ["logs", "bench"])
@pytest.mark.parametrize("tag", ["../x", ".hidden", "-x", "a b", "x" * 65, ""])
def test_a_tag_that_can_name_no_log_is_a_usage_error(tmp_path, command, tag):
    """Refused before any host is asked for it."""
    told = json.loads(deployctl(command, "--json", f"--log-tag={tag}", folder=tmp_path).stdout)
    assert ("usage", True) == (told["error"]["kind"], f"log tag {tag!r} cannot name a log" in told["error"]["message"])


@pytest.mark.parametrize("name", ["patches", "playbooks", "patches/example"])
def test_init_writes_all_or_nothing(tmp_path, name):
    """A file where a folder should be: named, and no half of a project is left."""
    blocked = tmp_path / name
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    result = deployctl("init", folder=tmp_path)
    assert (2, True) == (result.returncode, f"{name} is no folder" in result.stderr)
    assert before == sorted(tmp_path.rglob("*"))
    blocked.unlink()
    assert 0 == deployctl("init", folder=tmp_path).returncode


def test_one_command_is_made_and_not_all():
    """Typer makes the options of every command that it knows: the program knows the one that is asked for."""
    assert ["push"] == [one.callback.__name__ for one in program("push").registered_commands]
    assert ["lock"] == [one.name for one in program("lock").registered_groups]
    for word in (None, "--help", "nosuch"):
        assert len(program(word).registered_commands) > 15
