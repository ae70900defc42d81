"""Servers that are not SGLang are measured by guidellm, the real one, through /v1/chat/completions."""

import json
import os
import signal

import pytest
from bench_env import guidellm_python
from rig import Rig
from sshd_rig import until

PROMPTS = [
    {"prompt": "Write a function that sorts"},
    {
        "messages": [
            {"role": "system", "content": "You mend code"},
            {"role": "user", "content": "It hangs"},
            {"role": "assistant", "content": "Show me the loop"},
            {"role": "user", "content": "while True: pass"},
        ]
    },
]
LOAD = "--prompts own.jsonl --max-tokens 12 --requests-per-level 6".split()


@pytest.fixture
def rig(tmp_path, engine_python):
    """A host whose server the inventory does not call SGLang, and whose generator has an environment of its own."""
    python = guidellm_python(engine_python)
    with Rig(tmp_path) as rig:
        hosts = rig.work / "hosts.yaml"
        plain = hosts.read_text()
        rig.write_hosts = lambda: hosts.write_text(
            plain
            + f"    engine: openai\n    bench: {{python: {python}}}\n    env: {{OPENAI_API_KEY: not-for-this-server}}\n"
        )
        rig.write_hosts()
        (rig.work / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
        yield rig


def test_guidellm_measures_a_server_that_speaks_openai(rig):
    """Messages whole, every request answered, the same numbers as its own report; a server that dies is named."""
    key = ("--", "--api-key", "sesame", "--standin-step-ms", "2")
    launched = rig.run("launch", "-t", "a", *key)
    assert launched.returncode == 0, launched.stderr
    host = rig.host("bench", "--sweep", "1,3", *LOAD)
    assert ("complete", 0) == (host["status"], host["exit_code"]), host
    record = host["bench"]
    assert {"name": "guidellm", "version": "0.8.1"} == record["generator"]
    assert ("openai", None) == (record["settings"]["engine"], record["settings"]["max_running_requests"])
    assert [(1, 6, 6, 72), (3, 6, 6, 72)] == [
        tuple(level[name] for name in ("concurrency", "sent", "completed", "output_tokens"))
        for level in record["levels"]
    ]
    folder = rig.home / ".deployctl" / "attempts" / "1" / "bench" / "1"
    for level in record["levels"]:
        report = json.loads((folder / f"raw-c{level['concurrency']}.json").read_text())["benchmarks"][0]
        metrics = report["metrics"]
        assert metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p99"] == level["ttft_ms"]["p99"]
        assert metrics["inter_token_latency_ms"]["successful"]["median"] == level["tpot_ms"]["p50"]
        assert 0 < level["ttft_ms"]["p50"] < level["e2e_ms"]["p50"]
        assert {None} == set(level["itl_ms"].values())
        sent = [json.loads(request["request_args"])["body"]["messages"] for request in report["requests"]["successful"]]
        assert PROMPTS[1]["messages"] in [
            [{"role": turn["role"], "content": turn["content"]} for turn in messages] for messages in sent
        ]
    assert not (folder / "guidellm.json").exists()

    # Dead in the middle: the same ending as with SGLang's own generator.
    pid = rig.host("status")["server"]["pid"]
    bench = rig.start("bench", "--sweep", "2", "--prompts", "own.jsonl", "--max-tokens", "2000")
    log = folder.parent / "2" / "generator-c2.log"
    until(log.exists, what="the generator's start")
    until(lambda: "POST /v1/chat" in (rig.home / "deployctl-logs" / "eagle3_a.log").read_text(), what="a request")
    os.kill(pid, signal.SIGKILL)
    _, err = bench.communicate(timeout=120)
    assert 6 == bench.returncode, err
