"""What a launch and its log may tell the user: on a broken link, on a terminal, under Ctrl-C, and for programs."""

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rig import Rig
from sshd_rig import Relay, free_port, until

from deployctl.cli.show_logs import _Printer
from deployctl.domain.report import HostReport, Report
from deployctl.render import text
from deployctl.render.progress import Progress

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize(
    "words", [("nosuch", "--json"), ("launch", "--json"), ("launch", "-t", "a", "--burst=-1", "--json")]
)
def test_json_is_one_object_for_a_wrong_command_line_too(words, tmp_path):
    """A program that reads stdout gets its object, whatever was mistyped."""
    done = subprocess.run(
        [sys.executable, "-m", "deployctl", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    value = json.loads(done.stdout)
    assert (2, False, words[0], "usage") == (done.returncode, value["ok"], value["command"], value["error"]["kind"])
    assert value["error"]["message"] in done.stderr


def test_json_after_the_dashes_belongs_to_the_server(tmp_path):
    """`-- --json` is an argument of the server: stdout stays empty."""
    done = subprocess.run(
        [sys.executable, "-m", "deployctl", "launch", "--", "--json"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (2, b"") == (done.returncode, done.stdout)


def test_characters_that_a_block_cuts_in_two_are_whole(capfdbinary):
    """Blocks end anywhere; only bytes that are no UTF-8 at all are escaped."""
    content = "čas 12 s €€ 🙂\n".encode() + b"bad \xff byte\n" + "ž".encode() + b"\xe2\x82"
    for cut in range(len(content) + 1):
        printer = _Printer(several=False)
        printer("h", content[:cut])
        printer("h", content[cut:])
        printer.flush()
        assert "čas 12 s €€ 🙂\nbad \\xff byte\nž\\xe2\\x82".encode() == capfdbinary.readouterr().out, cut


@pytest.mark.parametrize(
    "command", ["history", "audit", "status", "clean", "doctor", "launch", "push", "lock", "other"]
)
def test_no_result_obeys_what_a_host_sends(command, monkeypatch, capsys):
    """Every text of a verdict is shown without terminal controls, on a terminal with colours too."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    attempt = {"attempt": 1, "log_tag": ESCAPE, "profile": ESCAPE, "release": 1, "state": ESCAPE, "cause": ESCAPE}
    attempt.update(at=0.0, ready_seconds=1.0)
    entry = {"at": 0.0, "operator": ESCAPE, "command": ESCAPE, "status": ESCAPE, "error": ESCAPE}
    release = {"current": True, "release": 1, "patches": [ESCAPE], "version": ESCAPE, "other_base": False}
    fields = {
        "attempts": [attempt],
        "entries": [entry],
        "releases": [{**release, "files": 1, "at": 0.0, "by": ESCAPE}],
        "release": 1,
        "patches": [ESCAPE],
        "package_dir": ESCAPE,
        "version": ESCAPE,
        "drift": [{"path": ESCAPE}],
        "drift_summary": ESCAPE,
        "gpus": [{"index": 0, "name": ESCAPE, "used_mib": 1, "total_mib": 2}],
        "tools": {"fuser": ESCAPE},
        "problems": [ESCAPE],
        "checks": [{"ok": False, "name": ESCAPE, "detail": ESCAPE, "hint": ESCAPE}],
        "attempt": {**attempt} if command == "status" else 1,
        "log_tag": ESCAPE,
        "log": ESCAPE,
        "warnings": [ESCAPE],
        "hold": {"operator": ESCAPE, "since": 0.0, "message": ESCAPE},
    }
    error = {"kind": "x", "message": ESCAPE, "hint": ESCAPE}
    text.report(Report(command=command, hosts=(HostReport(name="h", status=ESCAPE, error=error, fields=fields),)))
    shown = "".join(capsys.readouterr())
    assert "\\x1b]0;owned\\x07" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_the_bar_takes_nothing_for_markup_and_cuts_no_path(monkeypatch):
    """Log lines that look like markup or emoji names come out as they are, a long path in one piece."""
    from rich.console import Console
    from rich.live import Live

    screen = io.StringIO()
    progress = Progress(several=False, verbose=False)
    progress._live = Live(console=Console(file=screen, width=30, force_terminal=True), auto_refresh=False)
    path = "/var/log/" + "a" * 60 + "/eagle3_t.log"
    progress("h", {"event": "note", "text": f":smile: [red]x[/red] {path}"})
    assert f":smile: [red]x[/red] {path}" in screen.getvalue()


def test_a_wait_is_said_once(capsys):
    """A step that reports the same every second is one line until something changes."""
    progress = Progress(several=False, verbose=False)
    for mib in (141000, 141000, 141000, 90000, 90000):
        progress("h", {"event": "step", "name": "clean", "state": "progress", "text": f"waiting: {mib} MiB"})
    assert ["clean: waiting: 141000 MiB", "clean: waiting: 90000 MiB"] == capsys.readouterr().err.splitlines()


def interrupted(process: subprocess.Popen) -> tuple[int, str, str, float]:
    """SIGINT; exit code, stdout, stderr and the seconds until the end."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err, time.monotonic() - began


def test_ctrl_c_while_connecting_asks_nothing(rig):
    """A host that accepts and says nothing: 130, nothing asked, no talk of authentication."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = rig.start("status", "--json", "--host", f"root@127.0.0.1:{silent.getsockname()[1]}")
        link, _ = silent.accept()
        with link:
            code, out, err, _ = interrupted(process)
    (host,) = json.loads(out)["hosts"].values()
    assert (130, "interrupted", "interrupted") == (code, host["status"], host["error"]["kind"])
    assert "nothing was asked" in host["error"]["message"]
    assert "Traceback" not in err


def test_a_link_that_is_down_is_survived_quietly_and_left_by_ctrl_c(tmp_path):
    """During an outage the launch retries without tracebacks; Ctrl-C detaches with 130 and the server loads on."""
    with Rig(tmp_path, load_s=8.0) as rig, Relay(rig.sshd.port) as relay:
        rig.sshd.known_hosts.write_text(
            "".join(f"[127.0.0.1]:{port} {rig.sshd.host_key_line}\n" for port in (relay.port, rig.sshd.port))
        )
        rig.write_hosts(port=relay.port)
        process = rig.start("launch", "--log-tag", "a", "--no-smoke")
        until(lambda: list((rig.home / "deployctl-logs").glob("*.log")), what="the log")
        assert process.stderr is not None
        seen = ""
        while "attempt 1" not in seen:
            seen = process.stderr.readline()
        relay.cut()
        while "attaching again" not in seen:
            seen = process.stderr.readline()
        code, _, err, _ = interrupted(process)
        assert 130 == code
        assert "deployctl wait" in err
        assert "Traceback" not in err
        relay.heal()
        assert "ready" == rig.host("wait", "--no-smoke")["status"]


def connections_to(port: int) -> int:
    """Established connections whose near end is a port of this machine."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "01" and int(fields[1].rpartition(":")[2], 16) == port for fields in rows)


def test_a_smoke_whose_link_breaks_is_asked_again(tmp_path):
    """The answer was on its way: the same generation is asked for again, and its result is the command's."""
    with Rig(tmp_path) as rig, Relay(rig.sshd.port) as relay:
        rig.sshd.known_hosts.write_text(
            "".join(f"[127.0.0.1]:{port} {rig.sshd.host_key_line}\n" for port in (relay.port, rig.sshd.port))
        )
        rig.write_hosts(port=relay.port)
        launched = rig.host("launch", "--log-tag", "a", "--no-smoke")
        port = int(launched["url"].rpartition(":")[2])
        os.killpg(launched["pid"], signal.SIGSTOP)
        try:
            process = rig.start("smoke", "--json")
            until(lambda: connections_to(port), what="the request")
            relay.cut()
            relay.heal()
        finally:
            os.killpg(launched["pid"], signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        assert 0 == process.returncode, err
        assert json.loads(out)["hosts"]["10.1.230.174"]["smoke"]["ok"]


def test_relaunch_tells_what_is_not_as_it_was_and_what_was_rolled_back(rig):
    """Words of the earlier command line that hosts.yaml does not hold are named; the rollback is in the one object."""
    assert "pushed" == rig.host("push", "--patch", "v3")["status"]
    first = rig.host("launch", "--log-tag", "t", "--no-smoke", "--", "--max-total-tokens", "4096")
    assert "ready" == first["status"]
    assert "pushed" == rig.host("push", "--patch", "v2")["status"]
    done = rig.run("rollback", "--relaunch", "--json")
    assert "rollback" == json.loads(done.stdout)["command"]
    (host,) = json.loads(done.stdout)["hosts"].values()
    assert (0, "ready", "t-r1") == (done.returncode, host["status"], host["log_tag"])
    assert ("rolled_back", ["dynamic_spec/v3"]) == (host["rollback"]["status"], host["rollback"]["patches"])
    assert "without --max-total-tokens 4096" in done.stderr


def test_a_launch_names_the_tool_that_is_missing(rig):
    """Devices but no nvidia-smi: the launch goes on, and its result says what could not be known."""
    device = Path(rig.home) / "dev" / "nvidia0"
    device.parent.mkdir()
    device.touch()
    done = rig.run("launch", "--log-tag", "a", "--no-smoke")
    assert 0 == done.returncode
    assert ["  GPU memory was not checked: nvidia-smi is not installed"] == [
        line for line in (done.stdout + done.stderr).splitlines() if "nvidia-smi" in line
    ]


def test_a_crash_on_a_terminal_is_harmless(rig):
    """An engine whose last words are terminal controls: the terminal gets them as text, from every command."""
    engine = rig.root / "engine.py"
    engine.write_text(
        f"import sys\nprint({ESCAPE!r}, flush=True)\nsys.exit('Traceback (most recent call last):\\n"
        f"  File \"/x.py\", line 1, in f\\n    boom()\\nRuntimeError: ' + {ESCAPE!r} + 'bad')\n"
    )
    hosts = rig.work / "hosts.yaml"
    hosts.write_text(
        hosts.read_text() + f'  bad:\n    command: ["{{python}}", {engine}]\n    engine: openai\n'
        '    ready: {url: "http://127.0.0.1:1/health", timeout: 20s}\n'
    )
    for words in (("launch", "--profile", "bad", "-t", "a"), ("logs",), ("logs", "--crash"), ("history",), ("audit",)):
        shown = on_a_terminal(rig, *words)
        assert b"]0;owned" in shown or words[0] == "launch"
        assert b"\x1b]0;" not in shown, words
        assert b"\x1b[2J" not in shown, words


def on_a_terminal(rig: Rig, *words: str) -> bytes:
    """A command's output on a pseudo-terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "deployctl", *words],
        env={**rig.environment, "TERM": "xterm-256color"},
        cwd=rig.work,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = bytearray()
    try:
        while block := os.read(master, 65536):
            shown += block
    except OSError:
        pass  # the end of a terminal on Linux
    os.close(master)
    process.wait(30)
    return bytes(shown)


@pytest.fixture
def pair(tmp_path):
    """Two hosts of one machine, and a profile of two ranks."""
    folders = f"state_dir: {tmp_path}/second, log_dir: {tmp_path}/logs"
    second = f"  second: {{{{address: 127.0.0.1, port: {{port}}, {folders}}}}}"
    with Rig(tmp_path, load_s=1.5, more_hosts=second) as rig:
        single = rig.write_hosts

        def write_hosts(port: int | None = None) -> None:
            single(port)
            file = rig.work / "hosts.yaml"
            file.write_text(
                file.read_text()
                .replace("    smoke: {", "    nodes: 2\n    engine: sglang\n    smoke: {")
                .replace('["{python}", -m, sglang.launch_server]', f'["{{python}}", {program}]')
                .replace("      standin-load:", f"{ranks}      standin-load:")
            )

        # Two ranks on one machine cannot serve the same port: the second takes another.
        program = tmp_path / "rank.py"
        program.write_text(
            "import runpy, sys\n"
            "if sys.argv[sys.argv.index('--node-rank') + 1] == '1':\n"
            f"    sys.argv += ['--port', '{free_port()}']\n"
            "runpy.run_module('sglang.launch_server', run_name='__main__')\n"
        )
        ranks = f'      dist-init-addr: "127.0.0.1:{free_port()}"\n      tp-size: 2\n'
        rig.write_hosts = write_hosts
        rig.write_hosts()
        yield rig
        rig.run("stop", "--host", "second")


def test_ranks_that_another_takes_along_are_no_ctrl_c(pair):
    """Rank 0 dies in the load: exit 6 and not 130, the other rank is ended and says with whom, nothing is left."""
    result = pair.json("launch", "-t", "a", "-H", "10.1.230.174,second", "--", "--standin-mode", "die")
    assert 6 == result["exit_code"]
    assert {6} == {host["exit"] for host in result["hosts"].values()}
    assert "crashed" == result["hosts"]["10.1.230.174"]["status"]
    left = pair.json("status", "-H", "10.1.230.174,second")["hosts"]
    assert [None, None] == [host["server"] for host in left.values()]


def test_ranks_whose_first_cannot_start_are_ended(pair):
    """Rank 0's port is taken: exit 10, and the other rank does not load on for nobody."""
    with socket.create_server(("127.0.0.1", pair.server_port)):
        result = pair.json("launch", "-t", "a", "-H", "10.1.230.174,second")
    assert 10 == result["exit_code"]
    left = pair.json("status", "-H", "10.1.230.174,second")["hosts"]
    assert [None, None] == [host["server"] for host in left.values()]


def test_ranks_of_a_server_that_answers_wrongly_live_on(pair):
    """The smoke fails: exit 7, both ranks are left running."""
    result = pair.json("launch", "-t", "a", "-H", "10.1.230.174,second", "--", "--standin-mode", "garbage")
    assert (7, "smoke_failed") == (result["exit_code"], result["hosts"]["10.1.230.174"]["status"])
    left = pair.json("status", "-H", "10.1.230.174,second")["hosts"]
    assert [True, True] == [host["server"] is not None for host in left.values()]
