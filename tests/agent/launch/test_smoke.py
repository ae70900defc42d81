"""Judging answers, asking in both dialects, and the smoke command on a server that runs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_host import Wire, free_port, until

from deployctl.agent import health, smoke, watcher
from deployctl.agent.failure import Failure


@pytest.mark.parametrize(
    ("text", "expect", "problem"),
    [
        ("Paris, of course.", "", None),
        ("Paris", "(?i)paris", None),
        ("London", "Paris", "does not match 'Paris'"),
        ("", "", "is empty"),
        (" \n ", "", "is blank"),
        (None, "", "is null, not text"),
        (["Paris"], "", 'is ["Paris"], not text'),
        ("+" * 50, "", 'repeats one token, "+"'),
        ("++++", "", "repeats one token"),
        ("+ + + +", "", "repeats one token"),
        ("++ + +++", "", "repeats one token"),
        ("the the the the", "", 'repeats one token, "the"'),
        ("abcabcabcabcab", "", 'repeats one token, "abc"'),
        ("!!!", "", None),
        ("1 2 3 4", "", None),
        ("hello hello world hello", "", None),
        ("aa aaa a", "", "repeats one token"),
        ("x\x1b[31m" * 2, "nothing", "\\u001b[31m"),
    ],
)
def test_an_answer_is_judged(text, expect, problem):
    """Nothing, no text, one token over and over, or not what was expected; quoted with controls escaped."""
    found = smoke.judge(text, expect)
    assert (found is None) == (problem is None), found
    assert (problem or "") in (found or "")
    assert "\x1b" not in (found or "")


@given(st.text(min_size=1, max_size=12).filter(lambda t: not any(c.isspace() for c in t)), st.integers(4, 40))
def test_any_token_repeated_to_the_end_is_found(token, count):
    """Whatever the token, with blanks between or without, the last one cut off or not."""
    assert smoke.judge(token * count, "") is not None
    assert smoke.judge(" ".join([token] * count), "") is not None
    assert smoke.judge(token * count + token[:-1], "") is not None


@given(st.lists(st.sampled_from("the a capital of France is Paris and Rome".split()), min_size=5, max_size=30))
def test_sentences_are_not_taken_for_one_token(words):
    """Different words are no repeated token."""
    text = " ".join(words)
    if len(set(words)) > 1:
        assert smoke.judge(text, "") is None


def test_long_answers_are_quoted_in_part():
    """Bounded."""
    assert smoke.quote("é" * 500).endswith('"...')
    assert len(smoke.quote("a" * 500)) < 250


@pytest.mark.parametrize("burst", [-1, 5000])
def test_a_burst_has_bounds(burst):
    """Threads are not for free."""
    with pytest.raises(Failure) as caught:
        smoke.check({"burst": burst})
    assert caught.value.exit_code == 2


class Server:
    """An HTTP server that answers as a test says: {(method, path): (status, bytes)}; the health URL is 200."""

    def __init__(self, answers):
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.path, json.loads(body) if body else None, self.headers.get("Authorization")))
                status, content = answers.get((self.command, self.path), (404, b"{}"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer  # noqa: N815 - the library names them

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/health"

    def questions(self, engine, **spec):
        attempt = {"ready": {"url": self.url}, "argv": ["server", "--api-key=k"], "engine": engine}
        return smoke._Questions(attempt, {"prompt": "Hi", "max_tokens": 4, "expect": "", **spec}, 5)


@pytest.fixture
def serve():
    servers = []

    def start(answers):
        servers.append(Server(answers))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


MODELS = ("GET", "/v1/models"), (200, b'{"data": [{"id": "kimi"}]}')
CHAT = b'{"choices": [{"message": {"content": "Paris it is"}}]}'


def test_completions_are_asked_with_the_servers_own_model_name(serve):
    """A strict server refuses any other; it is asked once."""
    server = serve(dict([MODELS, (("POST", "/v1/completions"), (200, b'{"choices": [{"text": "Paris it is"}]}'))]))
    questions = server.questions("openai")
    assert questions.ask() == ("Paris it is", None)
    assert questions.ask(3) == ("Paris it is", None)
    assert [path for path, _, _ in server.asked] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert server.asked[1][1] == {"model": "kimi", "max_tokens": 4, "temperature": 0, "prompt": "Hi"}
    assert server.asked[2][1]["prompt"] == "Hi (3)"
    assert {key for _, _, key in server.asked} == {"Bearer k"}


def test_a_server_without_completions_is_asked_to_chat(serve):
    """404 and only 404 leads there."""
    server = serve(dict([MODELS, (("POST", "/v1/chat/completions"), (200, CHAT))]))
    assert server.questions("openai", model="named").ask() == ("Paris it is", None)
    assert server.asked[-1][1]["model"] == "named"
    broken = serve(dict([MODELS, (("POST", "/v1/completions"), (500, b"oops"))]))
    assert broken.questions("openai").ask()[1] == '/v1/completions answered HTTP 500: "oops"'
    neither = serve({})
    assert "answered HTTP 404" in neither.questions("openai").ask()[1]


@pytest.mark.parametrize("models", [(500, b""), (200, b"no json"), (200, b'{"data": []}'), (200, b"[]")])
def test_a_server_that_lists_no_models_is_asked_all_the_same(serve, models):
    """A server with one model takes any name."""
    server = serve(
        {("GET", "/v1/models"): models, ("POST", "/v1/completions"): (200, b'{"choices": [{"text": "ok!"}]}')}
    )
    assert server.questions("openai").ask() == ("ok!", None)
    assert server.asked[-1][1]["model"] == "default"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((200, b"<html>"), "answered no JSON"),
        ((200, b"\xff\xfe"), "answered no JSON"),
        ((200, b"[]"), "JSON of another shape"),
        ((200, b'{"txet": 1}'), "JSON of another shape"),
        ((200, b'{"text": 5}'), "5, not text"),
        ((503, b"busy"), 'HTTP 503: "busy"'),
    ],
)
def test_answers_that_are_none(serve, answer, problem):
    """Status, JSON, shape, type."""
    text, found = serve({("POST", "/generate"): answer}).questions("sglang").ask()
    assert text is None
    assert problem in found


def test_a_server_that_is_gone_is_a_problem_and_no_exception():
    """Refused."""
    attempt = {"ready": {"url": "http://127.0.0.1:1/health"}, "argv": ["x"], "engine": "sglang"}
    text, problem = smoke._Questions(attempt, {"prompt": "x", "max_tokens": 1}, 1).ask()
    assert text is None
    assert "no answer" in problem


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["x", "--api-key", "k1"], "Bearer k1"),
        (["x", "--api-key=k2"], "Bearer k2"),
        (["x", "--api-key"], None),
        (["x", "--api-keys", "k"], None),
    ],
)
def test_the_key_is_read_from_the_command_line(argv, key):
    """Both ways to write it."""
    assert health.authorization(argv).get("Authorization") == key


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:30000/health", "http://127.0.0.1:30000"),
        ("http://[::1]:8000/health?x=1", "http://[::1]:8000"),
        ("http://gpu/health", "http://gpu:80"),
    ],
)
def test_the_base_of_a_url(url, base):
    """Host and port, IPv6 in brackets."""
    assert health.base_of(url) == base


def test_proxies_are_ignored(serve, monkeypatch):
    """A probe of this host must not go through a proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = serve({("GET", "/health?a=b"): (200, b"fine")})
    assert health.request(server.url + "?a=b") == (200, b"fine")


# -- the command on a server that runs ---------------------------------------------------------------------------------


def test_smoke_asks_the_running_server(host):
    """The profile's smoke, or another; the verdict follows."""
    host.launch("a", smoke=False, load_s=0.2)
    result = host.ask("smoke", burst=3)
    assert (result["status"], result["exit"], result["smoke"]["burst"]["answered"]) == ("ready", 0, 3)
    failed = host.ask("smoke", smoke={"prompt": "x", "max_tokens": 4, "expect": "^nothing$"})
    assert (failed["status"], failed["exit"]) == ("smoke_failed", 7)
    assert host.attempt()["verdict"]["state"] == "smoke_failed"
    assert host.ask("smoke")["status"] == "ready"
    assert host.attempt()["verdict"]["state"] == "ready"
    assert host.ask("smoke", burst=-2)["exit"] == 2
    assert host.ask("smoke", smoke={"prompt": "x", "max_tokens": 4, "expect": "("})["exit"] == 2


def test_smoke_takes_the_server_that_lives(host):
    """A newer attempt that crashed is not what is meant; by number it is, and its end is said."""
    host.launch("a", smoke=False, load_s=0.2)
    port, host.port = host.port, free_port()
    host.launch("b", argv=host.script("raise SystemExit(1)"))
    host.port = port
    assert host.ask("smoke")["attempt"] == 1
    gone = host.ask("smoke", attempt=2)
    assert (gone["exit"], gone["error"]["kind"]) == (6, "not-running")
    host.ask("stop")
    assert host.ask("smoke", attempt=1)["exit"] == 2
    assert host.ask("smoke", attempt=1)["error"]["message"].endswith("is not running: stopped")


def test_smoke_of_a_load_is_refused_and_judges_nothing(host):
    """Not ready is not a failed smoke."""
    host.launch("a", load_s=1.2, wait=False)
    early = host.ask("smoke")
    assert (early["exit"], early["error"]["kind"]) == (5, "not-ready")
    assert host.attempt()["verdict"] is None
    until(lambda: b"fired up" in host.log().read_bytes())
    assert host.ask("smoke")["status"] == "ready"


def test_smoke_needs_something_to_ask(host):
    """Rank 0, and a prompt."""
    host.launch("a", load_s=0.2, smoke_spec=None)
    assert host.ask("smoke")["error"]["kind"] == "no-smoke"
    host.rewrite("spec", rank=1)
    assert host.ask("smoke")["error"]["kind"] == "not-rank-0"


def test_a_smoke_that_kills_the_server_is_a_crash(host):
    """Found by the command as by the launch."""
    host.launch("a", mode="burst", smoke=False)
    result = host.ask("smoke", burst=8)
    assert (result["status"], result["exit"]) == ("crashed", 6)
    assert result["smoke"]["burst"]["sent"] == 8
    assert "illegal memory access" in result["crash"]["cause"]


def test_a_server_that_stays_unwell_after_a_burst_fails_it(host, monkeypatch):
    """All answered, and health says 503 from then on."""
    monkeypatch.setattr(smoke, "_UNWELL_S", 0.3)
    script = """
        import http.server, json, sys
        asked = []
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_): pass
            def answer(self, status, body):
                self.send_response(status); self.send_header("Content-Length", str(len(body))); self.end_headers()
                self.wfile.write(body)
            def do_GET(self):
                self.answer(503 if len(asked) > 2 else 200, b"")
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"])); asked.append(1)
                self.answer(200, json.dumps({"text": "all is well"}).encode())
        print("The server is fired up and ready to roll!", flush=True)
        http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
    result = host.launch("a", argv=host.script(script), burst=4)
    assert (result["status"], result["exit"]) == ("smoke_failed", 7)
    assert result["error"]["message"] == "the server is not healthy after the burst (HTTP 503)"
    assert result["smoke"]["burst"]["answered"] == 4


def test_a_server_that_stops_answering_after_a_burst_fails_it(host, monkeypatch):
    """The same with a closed port."""
    monkeypatch.setattr(smoke, "_UNWELL_S", 0.3)
    host.launch("a", argv=host.script("import time\ntime.sleep(60)"), wait=False)
    context = host.context("smoke")
    watched = watcher.Watcher(context, host.attempt())
    assert smoke._unwell_after(context, host.attempt(), watched, "burst").endswith("(it does not answer)")
    context.wire.cancelled.set()
    assert smoke._unwell_after(context, host.attempt(), watched, "burst") == "cancelled"


def test_threads_that_the_system_refuses_are_requests_without_an_answer(host, monkeypatch):
    """A burst above what the host can start is told as such."""
    host.host["limits"]["burst_s"] = 1
    host.launch("a", smoke=False, load_s=0.2)
    start, started = threading.Thread.start, []

    def refuse(self):
        if self._target is not None and self._target.__name__ == "one":
            started.append(self)
            if len(started) > 3:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    result = host.ask("smoke", burst=5)
    assert result["error"]["message"] == "3 of 5 requests got no answer within 1 s"


def test_a_first_answer_that_never_comes_fails_in_bounded_time(host):
    """The limit of the burst holds for one as well."""
    host.host["limits"]["burst_s"] = 0.5
    host.launch("a", "--standin-burst-limit", "0", mode="burst-hang", wait=False)
    until(lambda: b"Uvicorn running" in host.log().read_bytes())
    host.rewrite("spec", engine="openai")
    host.rewrite("verdict", state="ready", ready_seconds=1.0)
    result = host.ask("smoke", Wire())
    assert result["exit"] == 7
    assert "no answer" in result["error"]["message"]
