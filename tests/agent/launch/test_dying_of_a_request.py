"""A server that dies of a request has crashed: nobody says that it is left running while it is still ending."""

import os
import signal

import pytest
from launch_host import until

from deployctl.agent import attempts, smoke, watcher

# Dies of its first generation: `slow` closes its sockets at once and is gone seconds later, as a process that gives
# much GPU memory back; `quick` is gone at once; `restart` answers health again after a pause.
ENGINE = """
    import http.server, os, sys, threading, time
    how, seconds = sys.argv[2], float(sys.argv[3])
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def do_GET(self):
            self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if how == "slow":
                server.socket.close(); self.connection.shutdown(2)
            if how == "restart":
                self.connection.shutdown(2); threading.Thread(target=server.shutdown).start()
                return
            time.sleep(seconds)
            print("Traceback (most recent call last):\\n  File \\"/x.py\\", line 1, in f\\n    g()", flush=True)
            print("RuntimeError: boom", flush=True)
            os._exit(1)
    class Server(http.server.ThreadingHTTPServer):
        allow_reuse_address = True
        daemon_threads = True
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever(poll_interval=0.01)
    server.server_close()
    time.sleep(seconds)
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def engine(host, how, seconds):
    return [*host.script(ENGINE), how, str(seconds)]


@pytest.mark.parametrize("engine_kind", ["sglang", "openai"])
@pytest.mark.parametrize(("how", "seconds"), [("quick", 0), ("slow", 2.5)])
def test_a_server_that_dies_of_its_first_request_has_crashed(host, how, seconds, engine_kind):
    """However long it takes from its last word to its exit: exit 6, the cause named, the smoke told."""
    spec = {"prompt": "x", "max_tokens": 4, "expect": "", "model": "m"}
    result = host.launch("a", argv=engine(host, how, seconds), engine=engine_kind, smoke_spec=spec)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert result["crash"]["cause"] == "RuntimeError: boom"
    assert result["crash"]["exit_code"] == 1
    assert not result["smoke"]["ok"]
    assert "left running" not in result["error"]["hint"]
    assert host.attempt()["verdict"]["state"] == "crashed"


def test_a_keeper_that_does_not_write_down_the_end_hides_no_crash(host):
    """The process is gone, its keeper is stopped: the smoke's verdict is a crash all the same."""
    assert host.launch("a", argv=engine(host, "quick", 0), smoke=False)["status"] == "ready"
    keeper = host.attempt()["run"]["keeper_pid"]
    os.kill(keeper, signal.SIGSTOP)
    try:
        result = host.ask("smoke")
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert "RuntimeError: boom" in result["crash"]["cause"]
    until(lambda: host.attempt()["exit"], "the keeper's record")


def test_a_server_that_comes_back_is_left_running(host):
    """It breaks one request and serves again: a failed smoke and no crash."""
    result = host.launch("a", argv=engine(host, "restart", 1.0))
    assert (result["status"], result["exit"]) == ("smoke_failed", 7)
    assert "no answer" in result["error"]["message"]
    assert "not healthy" not in result["error"]["message"]
    assert attempts.is_alive(host.attempt())


def test_a_server_that_stays_silent_after_a_failed_smoke_is_said_to_be(host, monkeypatch):
    """It lives and does not answer: left running after a bounded time, and its health is told."""
    monkeypatch.setattr(smoke, "_UNWELL_S", 0.4)
    result = host.launch("a", argv=engine(host, "restart", 60))
    assert (result["status"], result["exit"]) == ("smoke_failed", 7)
    assert "the server is not healthy after the smoke (it does not answer)" in result["error"]["message"]
    assert attempts.is_alive(host.attempt())


def test_a_server_that_is_gone_at_the_deadline_is_no_timeout(host, monkeypatch):
    """The wait's time is over while the keeper is about to write down the end: crashed, not left running."""
    monkeypatch.setattr(watcher, "_RECORD_GRACE_S", 1.5)
    host.launch("a", argv=host.script("import time\nprint('starting', flush=True)\ntime.sleep(60)"), wait=False)
    keeper = host.attempt()["run"]["keeper_pid"]
    os.kill(keeper, signal.SIGSTOP)
    try:
        os.kill(host.server()[0], signal.SIGKILL)
        result = host.ask("wait", timeout_s=0.3)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    until(lambda: host.attempt()["exit"], "the keeper's record")
