"""From launch to ready: phases, smoke, burst, and what each of them finds."""

import hashlib
import re

import pytest
from launch_host import until

from deployctl.agent import attempts, health, processes, watcher

ORDER = ["init", "weights", "kv-cache", "graphs", "warm-up"]


def test_a_launch_is_followed_to_ready_smoked_and_burst(host):
    """Every phase is told with its start and its end, and the result holds what the contract names."""
    result = host.launch("t1", burst=8)
    assert (result["status"], result["exit"], result["error"]) == ("ready", 0, None)
    assert ORDER == [phase["name"] for phase in result["phases"]]
    assert result["log"] == str(host.root / "logs" / "eagle3_t1.log")
    assert (result["attempt"], result["release"], result["patches"], result["port"]) == (1, None, [], host.port)
    assert result["url"] == f"http://127.0.0.1:{host.port}"
    assert result["crash"] is None
    assert result["smoke"]["ok"]
    assert result["smoke"]["burst"]["answered"] == 8
    assert result["smoke"]["burst"]["failed"] == []
    assert host.server()[0] == result["pid"]
    assert 0 <= host.wire.named("attempt")[0]["elapsed_s"] < 20
    told = [(event["name"], event["state"]) for event in host.wire.named("phase") if event["state"] != "progress"]
    assert [name for name, state in told if state == "done"] == ORDER
    assert [name for name, state in told if state == "start"] == ORDER[1:]
    assert any(0 < event["progress"] <= 1 for event in host.wire.named("phase") if event["state"] == "progress")
    kinds = [event["event"] for event in host.wire.events]
    assert kinds.index("attempt") < kinds.index("ready") < kinds.index("smoke") < kinds.index("burst")
    assert host.attempt()["verdict"]["state"] == "ready"
    assert abs(sum(phase["seconds"] for phase in result["phases"]) - result["ready_seconds"]) < 2


def test_a_second_launch_expects_what_the_first_took(host):
    """The bar's ETA comes from the attempts of that profile that became ready, phase by phase."""
    first = host.launch("t1")
    assert host.wire.named("expect") == []
    host.ask("stop")
    host.launch("t2")
    expected = host.wire.named("expect")[0]
    assert expected["ready_seconds"] == first["ready_seconds"]
    assert set(ORDER) == set(expected["phases"])


def test_a_repeated_tag_leaves_the_earlier_log_alone(host):
    """Two launches of one tag make two files, and the crash that the first holds stays readable."""
    died = host.launch("t5_v3", "--standin-die-at", "0.2", mode="die")
    assert died["status"] == "crashed"
    before = hashlib.sha256(host.log(1).read_bytes()).hexdigest()
    again = host.launch("t5_v3")
    assert again["status"] == "ready"
    assert again["log"] == str(host.root / "logs" / "eagle3_t5_v3.2.log")
    assert before == hashlib.sha256(host.log(1).read_bytes()).hexdigest()


def test_a_model_list_that_answers_early_is_not_ready(host):
    """/v1/models says 200 while the engine loads; ready comes after the load, and the smoke after that."""
    behind = host.launch_behind("a", mode="early200", load_s=1.6)

    def listed():
        try:
            return health.request(f"http://127.0.0.1:{host.port}/v1/models")[0] == 200
        except OSError:
            return False

    until(listed, "the early answer")
    assert behind.wire.named("ready") == []
    behind.event("health", status=503)
    result = behind.finish()
    assert result["status"] == "ready"
    assert ORDER == [phase["name"] for phase in result["phases"]]


def test_a_slow_health_answer_is_waited_for(host):
    """SGLang's health may take up to 20 s: slow is not dead."""
    result = host.launch("a", "--standin-health-delay", "2.5", mode="slowhealth", smoke=False)
    assert result["status"] == "ready"
    assert result["smoke"] is None


def test_a_silent_load_is_not_cut_off(host):
    """No line and no answer for the whole load is no evidence; the timeout alone ends the wait, and leaves the server."""
    timed_out = host.launch("a", mode="silent", load_s=2.5, timeout_s=1.2)
    assert (timed_out["status"], timed_out["exit"]) == ("timeout", 5)
    assert "health does not answer" in timed_out["error"]["message"]
    assert host.attempt()["verdict"]["state"] == "timeout"
    assert attempts.is_alive(host.attempt())
    assert host.ask("status")["server"]["state"] == "timeout"
    assert host.ask("wait")["status"] == "ready"


@pytest.mark.parametrize(
    ("mode", "quoted"),
    [("garbage", '"+'), ("empty", "empty"), ("nulltext", "null"), ("html", "<!DOCTYPE html>")],
)
def test_a_healthy_server_that_answers_nonsense_fails_its_smoke(host, mode, quoted):
    """HTTP 200 proves nothing about the text; it is quoted, the verdict is recorded, and the server is left running."""
    result = host.launch("a", mode=mode)
    assert (result["status"], result["exit"]) == ("smoke_failed", 7)
    assert quoted in result["error"]["message"]
    assert not result["smoke"]["ok"]
    assert host.attempt()["verdict"]["state"] == "smoke_failed"
    assert attempts.state_of(host.attempt()) == "smoke_failed"
    assert attempts.is_alive(host.attempt())
    assert "deployctl stop" in result["error"]["hint"]


def test_an_answer_that_does_not_match_fails(host):
    """`expect` is searched for in the text."""
    spec = {"prompt": "The capital of France is", "max_tokens": 8, "expect": "xyzzy[0-9]"}
    result = host.launch("a", smoke_spec=spec)
    assert result["exit"] == 7
    assert "does not match 'xyzzy[0-9]'" in result["error"]["message"]


def test_a_crash_that_needs_a_batch_is_found_by_the_burst(host):
    """One request passes, many at once bring the scheduler down: crashed and not merely a failed smoke."""
    result = host.launch("a", mode="burst", burst=8)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert "illegal memory access" in result["crash"]["cause"]
    assert result["smoke"]["text"]
    assert result["smoke"]["burst"]["sent"] == 8
    assert result["smoke"]["burst"]["problem"]
    assert host.attempt()["verdict"]["state"] == "crashed"


def test_requests_that_are_never_answered_fail_the_burst(host):
    """All must answer in bounded time; the server lives and is left."""
    host.host["limits"]["burst_s"] = 1.5
    result = host.launch("a", mode="burst-hang", burst=8)
    assert (result["status"], result["exit"]) == ("smoke_failed", 7)
    assert re.match(r"\d of 8 requests (failed|got no answer)", result["error"]["message"])
    assert result["smoke"]["burst"]["answered"] == 4
    assert len(result["smoke"]["burst"]["failed"]) <= 5


def test_what_is_left_of_a_crashed_server_is_asked_nothing(host):
    """Its launcher answers health checks without a scheduler: smoke and bench say crashed at once, with the cause."""
    host.launch("a", mode="dead200", smoke=True)
    assert host.attempt()["verdict"]["state"] == "crashed"
    assert processes.alive(*host.server())
    for operation, args in (("smoke", {}), ("bench", {"levels": [1], "max_tokens": 8})):
        result = host.ask(operation, **args)
        assert (6, "crashed") == (result["exit"], result["error"]["kind"]), operation
        assert host.attempt()["verdict"]["crash"]["cause"] in result["error"]["message"]
        assert "deployctl stop" in result["error"]["hint"]


@pytest.mark.parametrize("mode", ["oldcrash", "dead200"])
def test_a_scheduler_that_is_gone_is_a_crash_though_http_lives_on(host, monkeypatch, mode):
    """An engine without a watchdog answers health for ever: the log or the lost rank tells, after a grace."""
    monkeypatch.setattr(watcher, "TERMINAL_GRACE_S", 0.5)
    host.host["limits"]["burst_s"] = 4
    result = host.launch("a", mode=mode)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert attempts.is_alive(host.attempt())
    assert "deployctl stop" in result["error"]["hint"]
    assert host.ask("stop")["status"] == "stopped"
    assert host.attempt()["verdict"]["state"] == "crashed"


def test_an_api_key_of_the_command_line_is_used(host):
    """A server that wants a key refuses health and generation without it."""
    result = host.launch("a", "--api-key", "s3cret")
    assert result["status"] == "ready", result["error"]


def test_other_engines_speak_the_openai_dialect(host):
    """Ready by health alone; completions with the model's own name; no phases but the whole load."""
    result = host.launch("a", engine="openai", burst=3)
    assert result["status"] == "ready", result["error"]
    assert result["smoke"]["burst"]["answered"] == 3
    assert result["phases"]
