"""The stand-in engine behaves as the real one: its load, its endpoints, its batches, its orderly end."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_engine import DEADLINE_S, Engine, alive, free_port, refused, until

MILESTONES = (
    r"server_args=ServerArgs\(model_path='/models/m'",
    r"Init torch distributed begin\.",
    r"Init torch distributed ends\. elapsed=\d+\.\d\d s, mem usage=",
    r"Load weight begin\. avail mem=",
    r"\rMulti-thread loading shards:   0% Completed \| 0/8 \[00:00<\?, \?it/s\]\r",
    r"\rMulti-thread loading shards: 100% Completed \| 8/8 \[\d\d:\d\d<00:00, +\d+\.\d\dit/s\]\n",
    r"Load weight end\. elapsed=",
    r"KV Cache is allocated\. #tokens: ",
    r"Memory pool end\. avail mem=",
    r"Capture cuda graph begin\. This can take up to several minutes\.",
    r"\rCapturing batches \(bs=1 avail_mem=\S+ GB\): 100%\|█{10}\| 6/6 \[",
    r"Capture cuda graph end\. Time elapsed: ",
    r"Load weight begin",
    r"Capture draft cuda graph begin\.",
    r"Capture draft extend cuda graph end\.",
    r"max_total_num_tokens=\d+, .*max_running_requests=48, ",
    r"INFO:     Started server process \[\d+\]",
    r"INFO:     Application startup complete\.",
    r"INFO:     Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    r'"GET /model_info HTTP/1\.1" 200 OK',
    r"Prefill batch, #new-seq: 1, ",
    r'"POST /generate HTTP/1\.1" 200 OK',
    r"The server is fired up and ready to roll!",
)


def test_the_load_prints_its_milestones_in_order(server):
    """Every phase shows in the log, in the engine's order, with its time stamps and progress bars."""
    at = 0
    log = server.log
    for milestone in MILESTONES:
        found = re.search(milestone, log[at:])
        assert found, f"{milestone!r} is not in the rest of the log:\n{log[at:]}"
        at += found.end()
    stamped = [line for line in log.replace("\r", "\n").split("\n") if line.startswith("[")]
    assert all(re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", line) for line in stamped)


def test_nothing_listens_while_it_loads(site):
    """A connection is refused until the ranks are ready; then health is 503 until the warm-up ends, and 200 after."""
    with Engine(site, "--standin-step-ms", "150", load_s=0.6) as engine:
        engine.wait_for("Load weight begin")
        assert refused(engine.port)
        engine.wait_for("Uvicorn running on")
        assert 503 == engine.request("/health")[0]
        assert 200 == engine.request("/model_info")[0]
        engine.wait_ready()
        assert 200 == engine.request("/health")[0]
        assert 200 == engine.request("/health_generate")[0]


def test_each_rank_is_a_process_with_its_title_in_its_own_session(site):
    """With two ranks, two schedulers; every line of theirs carries the rank."""
    with Engine(site, "--tp-size", "2") as engine:
        engine.wait_ready()
        ranks = engine.ranks()
        assert ["sglang::scheduler_TP0", "sglang::scheduler_TP1"] == sorted(ranks.values())
        assert {pid: pid for pid in ranks} == {pid: os.getsid(pid) for pid in ranks}
        for rank in (0, 1):
            assert re.search(rf"\[[-\d: ]+ TP{rank}\] Load weight begin", engine.log)


def test_one_rank_has_no_number(server):
    """As in the engine, a lone scheduler is just that, in its command line and in its name (which has 15 bytes)."""
    ((pid, title),) = server.ranks().items()
    assert ("sglang::scheduler", "sglang::schedul\n") == (title, Path(f"/proc/{pid}/comm").read_text())


def test_server_info_shows_the_arguments(server):
    """What runs can be asked; old and new path."""
    for path in ("/server_info", "/get_server_info"):
        status, text = server.request(path)
        info = json.loads(text)
        assert (200, "EAGLE3", 16, 48, server.port, "0.5.12+standin") == (
            status,
            info["speculative_algorithm"],
            info["speculative_num_draft_tokens"],
            info["max_running_requests"],
            info["port"],
            info["version"],
        )
    assert "/models/m" == json.loads(server.request("/get_model_info")[1])["model_path"]
    assert "/models/m" == json.loads(server.request("/v1/models")[1])["data"][0]["id"]


def test_text_is_varied_and_depends_on_the_prompt_alone(server):
    """The same prompt gives the same text, another one another; no token repeats in a short answer."""
    first, again, other = (server.generate(prompt, 20) for prompt in ("a tree", "a tree", "a river"))
    assert first == again
    assert first != other
    assert 20 == len(set(first.split()))
    assert server.generate("The capital of France is", 3) == " Paris is the"
    assert [first, other] == server.generate(["a tree", "a river"], 20)


def test_the_open_ai_routes_answer_in_their_shapes(server):
    """Completions and chat completions carry text, reason and usage."""
    body = json.loads(server.request("/v1/completions", {"prompt": "two words", "max_tokens": 5})[1])
    assert 5 == len(body["choices"][0]["text"].split())
    assert {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7} == body["usage"]
    messages = [{"role": "user", "content": "hello"}]
    body = json.loads(server.request("/v1/chat/completions", {"messages": messages, "max_tokens": 6})[1])
    assert 6 == len(body["choices"][0]["message"]["content"].split())


def events(text):
    """The JSON values of a stream, which must end as one."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert "[DONE]" == lines.pop()
    return [json.loads(line) for line in lines]


def test_a_stream_grows_to_the_whole_answer(server):
    """/generate repeats the text so far with its count of tokens, the OpenAI routes give what is new, usage last."""
    whole = server.generate("a tree", 20)
    asked = {"text": "a tree", "sampling_params": {"max_new_tokens": 20}, "stream": True}
    chunks = events(server.request("/generate", asked)[1])
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert (whole, 20, sorted(set(counts))) == (chunks[-1]["text"], counts[-1], counts)
    assert all(whole.startswith(chunk["text"]) for chunk in chunks)
    assert len(chunks) > 4
    asked = {"prompt": "a tree", "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(server.request("/v1/completions", asked)[1])
    assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22} == usage["usage"]
    asked = {"messages": [{"role": "user", "content": "a tree"}], "max_completion_tokens": 20, "stream": True}
    chunks = events(server.request("/v1/chat/completions", asked)[1])
    assert whole == "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    for wrong in ({"text": ["a"]}, {"text": "a", "sampling_params": {"max_new_tokens": 0}}):
        assert 400 == server.request("/generate", {**wrong, "stream": True})[0]


def test_the_accept_length_is_counted_from_flush_to_flush(server):
    """Tokens for each step of the draft and its check; nothing is flushed while a request runs."""

    def accepted():
        return json.loads(server.request("/server_info")[1])["internal_states"][0].get("avg_spec_accept_length")

    server.generate("a tree", 30)
    assert 1 < accepted() <= 16
    assert 200 == server.request("/flush_cache", {})[0]
    assert accepted() is None
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, "a long story", 400)
        until(lambda: running.done() or 400 == server.request("/flush_cache", {})[0])
        assert not running.done()
        running.result(DEADLINE_S)
    assert 200 == server.request("/flush_cache")[0]


def test_the_load_generator_writes_what_it_measured(server, site, tmp_path):
    """Every request of the data set, streamed; the engine's flags, and no others."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    turns = [{"role": "user", "content": "a tree and a river"}, {"role": "assistant", "content": "-"}]
    data.write_text((json.dumps({"conversations": turns}) + "\n") * 6)
    argv = [site, "-m", "sglang.bench_serving", "--base-url", f"http://127.0.0.1:{server.port}", "--dataset-path", data]
    argv += ["--num-prompts", "6", "--sharegpt-output-len", "10", "--max-concurrency", "3", "--output-file", out]
    done = subprocess.run([*argv, "--output-details", "--flush-cache"], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "| 6/6 [" in done.stderr
    result = json.loads(out.read_text())
    assert (6, 60, 3, [10] * 6, [""] * 6) == tuple(
        result[key] for key in ("completed", "total_output_tokens", "max_concurrency", "output_lens", "errors")
    )
    assert 60 / result["duration"] == pytest.approx(result["output_throughput"])
    assert 1 < result["accept_length"]
    assert all(9 == len(gaps) for gaps in result["itls"])
    assert 2 == subprocess.run([*argv, "--no-such-flag"], capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", b"{", 400),
        ("/generate", [1], 400),
        ("/generate", {"text": 7}, 400),
        ("/generate", {"text": []}, 400),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}, 400),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": "9"}}, 400),
        ("/generate", {"text": "x", "sampling_params": [1]}, 400),
        ("/v1/completions", {"max_tokens": 5}, 400),
        ("/v1/chat/completions", {"messages": "hello"}, 400),
        ("/generate", b"[" * 100_000, 400),
        ("/v2/nothing", {}, 404),
        ("/nothing", None, 404),
        ("/generate", None, 405),
        ("/health", {}, 405),
    ],
)
def test_bad_requests_are_refused_and_the_server_lives(server, path, body, expected):
    """A wrong request is the client's fault alone."""
    assert expected == server.request(path, body)[0]
    assert 200 == server.request("/health")[0]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"POST /generate HTTP/1.1\r\nContent-Length: many", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -1", 400),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        (b"POST /generate HTTP/1.1", 400),
        (b"HEAD /health HTTP/1.1", 405),
        (b"PUT /generate HTTP/1.1\r\nContent-Length: 2", 405),
        (b"DELETE /nothing HTTP/1.1", 404),
    ],
)
def test_what_no_client_library_sends_is_answered_too(server, head, expected):
    """One answer, no traceback in the log, no part of a body taken for the next request."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head + b"\r\nHost: x\r\nConnection: close\r\n\r\n{}")
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert [str(expected).encode()] == re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert "Traceback" not in server.log


def test_without_graphs_none_is_captured_and_every_step_is_eager(site):
    """The flag is honoured in the load and in the steps."""
    options = ("--speculative-algorithm", "EAGLE3", "--decode-log-interval", "1", "--disable-cuda-graph")
    with Engine(site, *options) as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(3))
        assert "Capture" not in engine.log
        assert {"False"} == set(re.findall(r"Decode batch.* cuda graph: (\w+)", engine.log))


def test_a_batch_beyond_the_largest_graph_is_eager(site):
    """Fifty at once without speculation; the graphs go to forty-eight."""
    with Engine(site, "--decode-log-interval", "1", "--standin-step-ms", "20") as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(60, tokens=60))
        for size, graph in re.findall(r"#running-req: (\d+), .* cuda graph: (\w+), gen", engine.log):
            assert str(int(size) <= 48) == graph
        assert re.search(r"Decode batch.* cuda graph: False", engine.log)


def test_requests_run_as_one_batch(server):
    """Six at once decode together, with the accepted length of the draft in the log."""
    texts = server.burst(6)
    assert all(isinstance(text, str) and text for text in texts)
    server.wait_for(r"Decode batch, #running-req: 6, .*accept len: 2\.00, accept rate: 0\.33, cuda graph: True")


def test_running_requests_are_bounded_and_the_rest_waits(site):
    """Five at once with room for two: all answered, never more than two in a batch."""
    with Engine(site, "--max-running-requests", "2", "--decode-log-interval", "1") as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(5, tokens=10))
        running = [int(number) for number in re.findall(r"Decode batch, #running-req: (\d+)", engine.log)]
        assert 2 == max(running)
        assert re.search(r"#queue-req: [1-3]\b", engine.log)


def test_a_request_whose_client_goes_away_is_aborted(site):
    """The batch is empty again, long before the answer would have been complete."""
    with Engine(site, "--standin-step-ms", "20", "--decode-log-interval", "1") as engine:
        engine.wait_ready()
        with pytest.raises(TimeoutError):
            engine.generate("long", tokens=100_000, timeout_s=0.3)
        engine.process.send_signal(signal.SIGTERM)
        assert -signal.SIGKILL == engine.wait_end()


def test_an_api_key_is_asked_for(site):
    """Without the key 401, for health as well; the warm-up brings it."""
    with Engine(site, "--api-key", "secret") as engine:
        engine.wait_ready()
        assert 401 == engine.request("/health")[0]
        assert 401 == engine.request("/generate", {"text": "x"})[0]


def test_termination_drains_first(site):
    """What runs is answered, health is 503 meanwhile, then everything ends, itself by SIGKILL as the engine does."""
    with Engine(site, "--standin-step-ms", "20", "--decode-log-interval", "1") as engine:
        engine.wait_ready()
        answers = []
        client = threading.Thread(target=lambda: answers.append(engine.generate("last", 40)))
        client.start()
        engine.wait_for(r"ready to roll!(?s:.*)Decode batch, #running-req: 1")
        engine.process.send_signal(signal.SIGTERM)
        engine.wait_for("Gracefully exiting... Remaining number of requests 1")
        assert 503 == engine.request("/health")[0]
        client.join()
        assert 40 == len(answers[0].split())
        assert -signal.SIGKILL == engine.wait_end()
        assert "Draining requests and shutting down..." in engine.log


def test_termination_while_loading_is_immediate(site):
    """The default effect of SIGTERM, and no rank stays behind."""
    with Engine(site, load_s=6) as engine:
        engine.wait_for("Load weight begin")
        engine.process.send_signal(signal.SIGTERM)
        assert -signal.SIGTERM == engine.wait_end()


def test_ranks_die_with_a_killed_server(site):
    """SIGKILL of the parent leaves nothing: the kernel tells the ranks."""
    with Engine(site, "--tp-size", "2") as engine:
        engine.wait_ready()
        assert 2 == len(engine.ranks())
        engine.process.kill()
        assert -signal.SIGKILL == engine.wait_end()


def test_a_killed_rank_ends_the_server(site):
    """Without a word of its own: the watchdog of 0.5.12 tells, and ends the rest."""
    with Engine(site, "--tp-size", "2") as engine:
        engine.wait_ready()
        victim = max(engine.ranks())
        os.kill(victim, signal.SIGKILL)
        assert -signal.SIGKILL == engine.wait_end()
        assert re.search(
            rf"Subprocess scheduler_\d \(pid={victim}\) crashed with exit code -9\. Triggering SIGQUIT", engine.log
        )
        assert "SIGQUIT received. signum=" in engine.log


def test_a_rank_killed_while_loading_ends_the_launch(site):
    """As when the kernel runs out of memory: rank and exit code are named, the status is 1."""
    with Engine(site, load_s=6) as engine:
        engine.wait_for("Load weight begin")
        os.kill(next(iter(engine.ranks())), signal.SIGKILL)
        assert 1 == engine.wait_end()
        assert "Rank 0 scheduler is dead. Please check if there are relevant logs." in engine.log
        assert "Exit code: -9" in engine.log


def test_unknown_flags_are_refused_at_once(site):
    """argparse's words and status, nothing started."""
    with Engine(site, "--enforce-eager") as engine:
        assert 2 == engine.wait_end()
        assert "sglang serve: error: unrecognized arguments: --enforce-eager" in engine.log
        assert "Load weight" not in engine.log


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (("--standin-load", "-1"), 2, "argument --standin-load: invalid"),
        (("--standin-step-ms", "nan"), 2, "argument --standin-step-ms: invalid"),
        (("--port", "70000"), 1, "ValueError: port (70000) must be between 1 and 65535"),
        (("--tp-size", "0"), 1, "AssertionError: tp_size must be positive"),
        (("--tp-size", "2", "--nnodes", "2"), 1, "AssertionError: nnodes > 1 needs --dist-init-addr HOST:PORT"),
        (("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "h"), 1, "needs --dist-init-addr HOST:PORT"),
        (("--standin-fail-rank", "1"), 1, "AssertionError: standin_fail_rank must be a rank"),
    ],
)
def test_wrong_arguments_end_before_the_load(site, options, status, text):
    """With the reason in the log, by argparse or by a check."""
    with Engine(site, *options, load_s=6) as engine:
        assert status == engine.wait_end()
        assert text in engine.log
        assert "Load weight" not in engine.log


def test_an_interrupt_is_an_orderly_end(site):
    """Ctrl-C at a terminal: uvicorn's words, status 0, no rank left."""
    with Engine(site) as engine:
        engine.wait_ready()
        engine.process.send_signal(signal.SIGINT)
        assert 0 == engine.wait_end()
        assert "Finished server process" in engine.log
        assert "Traceback" not in engine.log


def test_two_nodes_meet_before_they_load(site):
    """Rank 0's node waits without a word for the other; the other serves a health that says nothing."""
    address = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--tp-size", "2", "--dist-init-addr", address)
    with Engine(site, *options, "--node-rank", "0") as first:
        first.wait_for("Init torch distributed begin")
        assert "Init torch distributed ends" not in first.log
        with Engine(site, *options, "--node-rank", "1") as second:
            first.wait_ready()
            second.wait_for("Starting dummy health check server")
            assert ["sglang::scheduler_TP1"] == list(second.ranks().values())
            until(lambda: not refused(second.port))
            assert 200 == second.request("/health")[0]
            assert "ready to roll" not in second.log


@pytest.mark.parametrize("mode", ["ok", "early200"])
def test_a_port_taken_by_a_twin_is_noticed_after_the_load(site, mode):
    """As with the engine: uvicorn's words, then the ready line, because the twin answers the warm-up; then status 3."""
    with Engine(site) as holder:
        holder.wait_ready()
        with Engine(site, "--standin-mode", mode, port=holder.port) as engine:
            assert 3 == engine.wait_end()
            error = (
                f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {holder.port}): "
                "address already in use"
            )
            assert engine.log.index(error) < engine.log.index("ready to roll!")
            assert "Capture cuda graph end" in engine.log
            assert "Uvicorn running" not in engine.log
        assert alive(holder.process.pid)
        assert 200 == holder.request("/health")[0]


def test_a_port_taken_by_a_mute_program_keeps_the_server_waiting(site):
    """As with the engine: the error is in the log, no ready line comes, and the processes stay."""
    with socket.create_server(("127.0.0.1", 0)) as holder, Engine(site, port=holder.getsockname()[1]) as engine:
        engine.wait_for(r"\[Errno 98\] error while attempting to bind on address")
        client, _ = holder.accept()
        client.close()
        # It asked, was not answered, and asks again.
        client, _ = holder.accept()
        client.close()
        assert engine.process.poll() is None
        assert engine.ranks()
        assert "ready to roll" not in engine.log


def test_the_port_is_free_again_at_once(site):
    """Connections that the server closed do not keep its successor off the port."""
    port = free_port()
    for _ in range(2):
        with Engine(site, port=port) as engine:
            engine.wait_ready()
            for _ in range(20):
                assert 200 == engine.request("/model_info")[0]
