"""Each fault mode of the stand-in engine fails as promised, and in no other way."""

import json
import re
import signal
import time

import pytest
from demo_engine import Engine, alive, refused, until


def test_die_runs_out_of_memory_in_the_load(site):
    """The rank's traceback, the launch phase's words, and the server's SIGKILL; nothing ever listened."""
    with Engine(site, "--standin-mode", "die", "--standin-die-at", "0.1", load_s=30) as engine:
        assert -signal.SIGKILL == engine.wait_end()
        assert re.search(
            r"^\[[-\d: ]+\] Scheduler hit an exception: Traceback \(most recent call last\):\n"
            r"(  .*\n)+torch\.cuda\.OutOfMemoryError: CUDA out of memory\.",
            engine.log,
            re.MULTILINE,
        )
        assert "Received sigquit from a child process. It usually means the child failed." in engine.log
        assert "Uvicorn" not in engine.log
        assert refused(engine.port)


def test_die_strikes_the_rank_that_was_asked_for(site):
    """The traceback carries that rank's mark; the other rank goes too."""
    with Engine(
        site,
        "--standin-mode",
        "die",
        "--standin-die-at",
        "0.1",
        "--standin-fail-rank",
        "1",
        "--tp-size",
        "2",
        load_s=30,
    ) as engine:
        assert -signal.SIGKILL == engine.wait_end()
        assert ["TP1"] == re.findall(r" (TP\d)\] Scheduler hit an exception", engine.log)


def test_early200_lists_models_long_before_it_is_ready(site):
    """The port answers while health says 503, and health says 200 only at the end of the load."""
    with Engine(site, "--standin-mode", "early200", load_s=0.8) as engine:
        until(lambda: not refused(engine.port))
        assert 200 == engine.request("/v1/models")[0]
        assert 503 == engine.request("/health")[0]
        assert "Uvicorn" not in engine.log
        engine.wait_ready()
        assert 200 == engine.request("/health")[0]
        assert engine.generate("hello")


@pytest.mark.parametrize("mode", ["dead200", "oldcrash"])
def test_the_server_outlives_its_scheduler(site, mode):
    """The first request kills the scheduler and is never answered; the parent goes on. Health tells in one mode only."""
    with Engine(site, "--standin-mode", mode, SGLANG_HEALTH_CHECK_TIMEOUT="0.3") as engine:
        engine.wait_ready()
        assert 200 == engine.request("/health")[0]
        with pytest.raises(TimeoutError):
            engine.generate("x", timeout_s=0.5)
        until(lambda: not engine.ranks())
        status = engine.request("/health")[0]
        assert alive(engine.process.pid)
        if mode == "dead200":
            assert 200 == status
            assert "terminate called after throwing an instance of 'c10::DistBackendError'" in engine.log
            assert "Scheduler hit an exception" not in engine.log
        else:
            assert 503 == status
            assert "Scheduler hit an exception: Traceback" in engine.log
            assert "Health check failed. Server couldn't get a response" in engine.log
        assert "sigquit" not in engine.log.lower()


def test_dead200_dies_by_itself_at_a_time(site):
    """With --standin-die-at no request is needed."""
    with Engine(site, "--standin-mode", "dead200", "--standin-die-at", "0.1") as engine:
        engine.wait_ready()
        until(lambda: not engine.ranks())
        assert 200 == engine.request("/health")[0]


def test_slowhealth_answers_late(site):
    """Health needs the delay, and is 200 then."""
    with Engine(site, "--standin-mode", "slowhealth", "--standin-health-delay", "0.5") as engine:
        engine.wait_ready()
        with pytest.raises(TimeoutError):
            engine.request("/health", timeout_s=0.2)
        began = time.monotonic()
        assert 200 == engine.request("/health")[0]
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(("mode", "text"), [("garbage", "++++" * 50), ("empty", ""), ("nulltext", None)])
def test_wrong_answers_come_with_a_healthy_server(site, mode, text):
    """Every route shows the same wrong text, health says 200, and the warm-up passed."""
    with Engine(site, "--standin-mode", mode) as engine:
        engine.wait_ready()
        assert 200 == engine.request("/health")[0]
        assert text == engine.generate("hello")
        assert text == json.loads(engine.request("/v1/completions", {"prompt": "x"})[1])["choices"][0]["text"]
        chat = json.loads(engine.request("/v1/chat/completions", {"messages": [{"content": "x"}]})[1])
        assert text == chat["choices"][0]["message"]["content"]


def test_html_is_a_page_with_status_200(site):
    """As from a proxy that stands in front of nothing."""
    with Engine(site, "--standin-mode", "html") as engine:
        engine.wait_ready()
        status, text = engine.request("/generate", {"text": "x"})
        assert (200, True) == (status, text.startswith("<!DOCTYPE html>"))


def test_burst_crashes_only_above_the_limit(site):
    """So many at once as allowed are answered; more end scheduler and server."""
    with Engine(site, "--standin-mode", "burst", "--standin-burst-limit", "3") as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(3))
        assert not any(isinstance(text, str) for text in engine.burst(8))
        assert -signal.SIGKILL == engine.wait_end()
        assert "RuntimeError: CUDA error: an illegal memory access was encountered" in engine.log
        assert "SIGQUIT received. signum=" in engine.log


def test_burst_hang_answers_those_below_the_limit(site):
    """Three are answered, two never; the server stays healthy, and a graceful end waits until their clients give up."""
    with Engine(site, "--standin-mode", "burst-hang", "--standin-burst-limit", "3") as engine:
        engine.wait_ready()
        answers = engine.burst(5, timeout_s=2)
        assert [3, 2] == [sum(isinstance(answer, kind) for answer in answers) for kind in (str, TimeoutError)]
        assert 200 == engine.request("/health")[0]
        engine.process.send_signal(signal.SIGTERM)
        assert -signal.SIGKILL == engine.wait_end()


def test_silent_says_nothing_for_the_whole_load(site):
    """Between the interpreter's own warning and the server's start there is no byte."""
    with Engine(site, "--standin-mode", "silent", "--speculative-algorithm", "EAGLE3", "--tp-size", "2") as engine:
        engine.wait_ready()
        first = next(line for line in engine.log.splitlines() if line.startswith("["))
        assert "Started server process" in first
        assert "\r" not in engine.log


@pytest.mark.parametrize("moment", ["Load weight begin", "ready to roll"])
def test_stubborn_ignores_termination(site, moment):
    """SIGTERM changes nothing, in the load and after."""
    with Engine(site, "--standin-mode", "stubborn") as engine:
        engine.wait_for(moment)
        engine.process.send_signal(signal.SIGTERM)
        engine.wait_ready()
        assert 200 == engine.request("/health")[0]
        engine.process.kill()
        assert -signal.SIGKILL == engine.wait_end()


@pytest.mark.parametrize("word", [signal.SIGKILL, signal.SIGTERM])
def test_orphans_survive_the_server(site, word):
    """However the parent goes, its scheduler stays, under another parent and with its title."""
    with Engine(site, "--standin-mode", "orphan") as engine:
        engine.wait_ready()
        ranks = engine.ranks()
        engine.process.send_signal(word)
        assert -signal.SIGKILL == engine.process.wait(20)
        until(lambda: refused(engine.port))
        assert ranks == engine.ranks()
        assert ["sglang::scheduler"] == list(ranks.values())


def test_exit0_leaves_with_success(site):
    """After ready, nothing in the log tells why."""
    with Engine(site, "--standin-mode", "exit0") as engine:
        assert 0 == engine.wait_end()
        assert engine.log.rstrip().endswith("The server is fired up and ready to roll!")


@pytest.mark.parametrize("options", [(), ("--standin-die-at", "0.3")])
def test_sigsegv_ends_the_server_by_signal(site, options):
    """After ready, or in the load where asked; the ranks go with it."""
    with Engine(site, "--standin-mode", "sigsegv", *options, load_s=30 if options else 0.2) as engine:
        assert -signal.SIGSEGV == engine.wait_end()
        assert ("ready to roll" in engine.log) == (not options)


def test_an_unknown_mode_is_refused(site):
    """argparse lists those there are."""
    with Engine(site, "--standin-mode", "nonsense") as engine:
        assert 2 == engine.wait_end()
        assert "invalid choice: 'nonsense'" in engine.log
