"""Levels that are measured: what is sent, what is recorded, and what is said."""

import json

import pytest
from bench_host import PROMPTS

from deployctl.agent import bench_levels


def levels_of(record):
    return [(level["concurrency"], level["sent"], level["completed"]) for level in record["levels"]]


def test_a_sweep_is_measured_and_recorded(host):
    """Every level sends what it should, all of it comes back, and the record on disk is the one that is reported."""
    assert host.launch("a", "--speculative-algorithm", "EAGLE3")["status"] == "ready"
    result = host.bench((1, 4, 2))
    assert (result["status"], result["exit"], result["error"]) == ("complete", 0, None)
    record = result["bench"]
    assert record == host.record()
    assert [(1, 6, 6), (4, 6, 6), (2, 6, 6)] == levels_of(record)
    for level in record["levels"]:
        assert 6 * 8 == level["output_tokens"]
        assert level["output_tokens"] / level["duration_s"] == pytest.approx(level["output_tok_per_s"])
        assert 1 < level["accept_length"] < 5
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert 0 < level[name]["p50"] <= level[name]["p90"] <= level[name]["p99"], name
    assert ("complete", "ann@example.org", "a") == (record["state"], record["by"], record["log_tag"])
    assert ("sglang", "0.5.12+standin", "EAGLE3") == tuple(
        record["settings"][key] for key in ("engine", "engine_version", "speculative_algorithm")
    )
    assert {"name": "sglang.bench_serving", "version": "0.5.12+standin"} == record["generator"]
    done = [event["concurrency"] for event in host.wire.named("level") if event["state"] == "done"]
    assert [1, 4, 2] == done
    assert "complete" == host.ask("audit")["entries"][-1]["status"]


def test_prompts_are_sent_whole_in_the_order_of_the_seed(host):
    """Every turn of a conversation is in what is sent; one seed is one order, another one another; too few begin anew."""
    load = {"levels": [1], "max_tokens": 8, "requests_per_level": None, "seed": 1}
    assert host.launch("a")["status"] == "ready"
    host.bench((1,))
    attempt = host.attempt()
    texts = [json.loads(line) for line in host.file("prompts.jsonl").read_text().splitlines()]
    assert len(PROMPTS) == len(texts)
    for turn in PROMPTS[2]["messages"]:
        assert turn["content"] in texts[2]

    def sent(seed, count):
        levels = bench_levels.Levels(
            host.context("bench"), attempt, dict(load, seed=seed), list("abcdefgh"), "/nowhere"
        )
        rows = levels._data(count).decode().splitlines()
        return [json.loads(row)["conversations"][0]["content"] for row in rows]

    assert sent(1, 20) == sent(1, 20)
    assert sorted("abcdefgh") == sorted(sent(1, 8)) != sent(1, 8)
    assert sent(1, 8) != sent(2, 8)
    assert sent(1, 20) == (sent(1, 8) * 3)[:20]


@pytest.mark.parametrize(("concurrency", "sent"), [(1, 16), (4, 16), (5, 20), (64, 256)])
def test_a_level_sends_four_for_each_place(concurrency, sent):
    """Without a number of requests: sixteen at least, four for each place."""
    assert sent == bench_levels.requests_of({"requests_per_level": None}, concurrency)
    assert 9 == bench_levels.requests_of({"requests_per_level": 9}, concurrency)


def test_a_level_whose_requests_fail_is_failed_and_the_next_is_tried(host):
    """Requests that get no answer: exit 7, the first distinct errors, and the sweep goes on."""
    engine = host.script(
        """
        import http.server, json, sys, time
        class Handler(http.server.BaseHTTPRequestHandler):
            count = 0
            def log_message(self, *args): pass
            def do_GET(self):
                body = json.dumps({"version": "0.5.12", "model_path": "/m", "max_running_requests": 4}).encode()
                self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
                self.wfile.write(body)
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                # The warm-up comes before the flush.
                Handler.count = Handler.count + 1 if self.path == "/generate" else 0
                if Handler.count % 3 == 2:
                    self.send_error(500, "Internal Server Error"); return
                self.send_response(200); self.end_headers()
                for n in range(1, 9):
                    value = {"text": "a" * n, "meta_info": {"completion_tokens": n}}
                    self.wfile.write(b"data: " + json.dumps(value).encode() + b"\\n\\n")
                self.wfile.write(b"data: [DONE]\\n\\n")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
        print("The server is fired up and ready to roll!", flush=True)
        server.serve_forever()
        """
    )
    assert host.launch("a", argv=engine, smoke=False)["status"] == "ready"
    result = host.bench((1, 2, 8), requests_per_level=9, pythons={"eagle3": str(host.python)})
    assert ("failed", 7) == (result["status"], result["exit"])
    assert [(1, 9, 6), (2, 9, 6), (8, 9, 6)] == levels_of(result["bench"])
    assert "level 1: 3 of 9 requests failed: Internal Server Error" in result["error"]["message"]
    assert 1 == len(result["bench"]["levels"][0]["errors"])
    assert any("at most 4 requests at once" in text for text in result["bench"]["warnings"])
    assert result["bench"] == host.record()
    assert result["crash"] is None


def test_a_level_out_of_time_ends_the_sweep(host):
    """The deadline is a level's own; its generator is ended, the levels before are kept, the rest is not tried."""
    assert host.launch("a", "--standin-step-ms", "60")["status"] == "ready"
    result = host.bench((8, 1, 2), max_tokens=40, requests_per_level=8, timeout_s=6)
    assert ("failed", 7) == (result["status"], result["exit"])
    assert [8, 1] == [level["concurrency"] for level in result["bench"]["levels"]]
    assert "level 1: not through within 6 s" in result["error"]["message"]
    assert "1 further levels were not tried" in result["error"]["message"]
    assert result["bench"]["levels"][1]["output_tok_per_s"] is None
    assert [] == host.generators()


def test_a_server_that_asks_for_a_key_is_measured(host):
    """Its key comes from its command line and goes into the generator's environment, not into anybody's `ps`."""
    seen = []

    def look(event):
        if event["event"] == "level" and event["state"] == "progress":
            seen.extend(process.command for process in host.generators())

    assert host.launch("a", "--api-key", "sesame", "--standin-step-ms", "20")["status"] == "ready"
    args, wire = host.bench_args((1,))
    wire.on_event = look
    assert host.ask("bench", wire, **args)["status"] == "complete"
    assert seen
    assert not [command for command in seen if "sesame" in command]
    assert "sesame" not in json.dumps(host.record())


def test_prompts_that_the_generator_leaves_out_are_missed(host):
    """Fewer were sent than asked for, and none failed: the level is no good, and says why."""
    assert host.launch("a")["status"] == "ready"
    result = host.bench((1,), prompts=[{"prompt": "one two"}, {"messages": [{"role": "user", "content": "word"}]}])
    assert ("failed", 7) == (result["status"], result["exit"])
    assert "sglang.bench_serving sent 3 of 6 requests" in result["error"]["message"]
    assert "tried" not in result["bench"]["levels"][0]
