"""The agent's end of the exchange, over real pipes."""

import contextlib
import json
import os
import threading

import pytest
from sshd_rig import until

from deployctl.agent import wire as wires
from deployctl.agent.wire import Wire


class Line:
    """Both ends of an exchange: `client_in`/`client_out` are the client's, `wire` the agent's."""

    def __init__(self, blobs=(), sent=b"", watch=True):
        self.agent_in, self.client_out = (
            os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        self.client_in, self.agent_out = (
            os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        self.client_out.write(sent)
        self.client_out.flush()
        if blobs:
            self.client_out.close()
        self.watch = watch
        self.wire = Wire(self.agent_in, self.agent_out, "word", blobs, watch)

    def send(self, payload: bytes) -> None:
        self.client_out.write(payload + b"\n")
        self.client_out.flush()

    def say(self, word: str, **fields) -> None:
        self.send(json.dumps({"control": word, **fields}).encode())

    def hear(self) -> dict:
        line = self.client_in.readline()
        assert line.startswith(b"@word "), line
        return json.loads(line[6:])


@pytest.fixture
def line():
    """A line that is hung up at the end of the test."""
    made = []

    def make(*args, **options):
        made.append(Line(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.client_out.close()
        if one.watch:
            assert one.wire.gone.wait(5)
        for end in (one.client_in, one.agent_in, one.agent_out):
            with contextlib.suppress(BrokenPipeError):  # what could not be written to a client that has gone
                end.close()


def test_events_data_and_the_verdict(line):
    """One line each, marked; data is followed by its very bytes, whatever they are."""
    one = line()
    one.wire.event("step", name="x\ny\udce9", count=1)
    one.wire.data(b"\0\n@word raw")
    one.wire.verdict({"status": "ok"})
    assert {"event": "step", "name": "x\ny\udce9", "count": 1} == one.hear()
    assert {"event": "data", "bytes": 11} == one.hear()
    assert b"\0\n@word raw" == one.client_in.read(11)
    assert {"event": "verdict", "result": {"status": "ok"}} == one.hear()


def test_threads_do_not_mix_their_lines(line):
    """Large events of many threads at once arrive whole."""
    one = line()
    threads = [
        threading.Thread(target=lambda n=number: [one.wire.event("e", text=str(n) * 20_000) for _ in range(10)])
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    heard = [one.hear()["text"] for _ in range(80)]
    for thread in threads:
        thread.join()
    assert sorted(heard) == sorted(str(number) * 20_000 for number in range(8) for _ in range(10))


def test_blobs_lie_before_the_controls(line):
    """Each of its size, in order."""
    one = line([("a", 3), ("empty", 0), ("b", 2)], b"abcde")
    assert {"a": b"abc", "empty": b"", "b": b"de"} == one.wire.blobs


def test_blobs_cut_short_mean_that_the_client_is_gone(line):
    """A link that broke while the patch was being sent: nothing may be begun."""
    one = line([("a", 3), ("b", 5)], b"abcd", watch=False)
    assert one.wire.cancelled.is_set()
    assert one.wire.gone.is_set()
    assert b"d" == one.wire.blobs["b"]


def test_controls_are_waited_for(line):
    """The wanted word with its fields; others, torn lines and signs of life are passed over, and kept for later."""
    one = line()
    one.send(b'{"control": "al')
    one.say("alive")
    one.say("abort", reason="other host")
    one.say("commit")
    assert {"control": "commit"} == one.wire.await_control(("commit",), 10)
    assert {"control": "abort", "reason": "other host"} == one.wire.await_control(("commit", "abort"), 10)
    assert one.wire.await_control(("commit",), 0.05) is None
    assert not one.wire.cancelled.is_set()


def test_what_is_no_control_at_all_is_passed_over(line):
    """JSON of another shape, a word that is no text, bytes that are no text: the controls after it still count."""
    one = line()
    for odd in (b"[]", b"3", b"null", b'"cancel"', b"\xff\xfe", b"{}", b'{"control": ["cancel"]}', b""):
        one.send(odd)
    one.say("commit")
    assert {"control": "commit"} == one.wire.await_control(("commit",), 10)
    assert not one.wire.cancelled.is_set()


def test_cancel_ends_a_wait(line):
    """Ctrl-C while the agent waits for the word to commit; the link is still there for the verdict."""
    one = line()
    threading.Timer(0.1, one.say, ["cancel"]).start()
    assert one.wire.await_control(("commit",), 20) is None
    assert one.wire.cancelled.is_set()
    one.wire.verdict({"status": "failed"})
    assert "verdict" == one.hear()["event"]


def test_a_client_that_hangs_up_ends_a_wait(line):
    """End of file: gone and cancelled; whatever is said after that goes nowhere and raises nothing."""
    one = line()
    threading.Timer(0.1, one.client_out.close).start()
    assert one.wire.await_control(("commit",), 20) is None
    assert one.wire.gone.is_set()
    one.wire.event("step", name="restore")
    one.wire.verdict({})


def test_a_client_that_no_longer_reads(line):
    """A broken pipe is noticed at the next event, ends waits and raises nothing."""
    one = line(watch=False)
    one.client_in.close()
    one.wire.event("step")
    assert one.wire.gone.is_set()
    assert one.wire.cancelled.is_set()
    one.wire.data(b"x")


def test_a_closed_stdin_is_a_client_that_has_gone(line):
    """The descriptor itself fails: the same as the end of the file."""
    one = line(watch=False)
    one.agent_in.close()
    one.wire._read_controls()
    assert one.wire.gone.is_set()


def test_signs_of_life(line, monkeypatch):
    """A quiet agent says that it lives; a client that is silent for too long counts as gone."""
    monkeypatch.setattr(wires, "HEARTBEAT_S", 0.0)
    one = line()
    assert {"event": "alive"} == one.hear()
    monkeypatch.setattr(wires, "CLIENT_SILENCE_S", 0.5)
    until(one.wire.cancelled.is_set, what="the end of patience")
    assert one.wire.gone.is_set()


def test_a_client_that_speaks_is_there(line, monkeypatch):
    """Each sign of life begins the patience anew."""
    monkeypatch.setattr(wires, "CLIENT_SILENCE_S", 2.5)
    one = line()
    for _ in range(8):
        one.say("alive")
        assert not one.wire.gone.wait(0.5)
