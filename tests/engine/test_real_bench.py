"""A bench of real SGLang 0.5.12 by its own load generator: every level answered, whole prompts, its numbers and no others."""

import json

PROMPTS = [
    {"prompt": "The capital of France is a city where people talk"},
    {
        "messages": [
            {"role": "system", "content": "You answer in one word"},
            {"role": "user", "content": "What is the capital of France"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "And of Italy"},
        ]
    },
]
SENT, TOKENS = 8, 8


def measure(run, *words):
    """The record of a bench, asked for with --json."""
    load = f"--prompts own.jsonl --max-tokens {TOKENS} --requests-per-level {SENT}".split()
    done = run("bench", *words, *load, "--json")
    return done.returncode, json.loads(done.stdout)["hosts"]["10.1.230.174"]


def test_a_sweep_of_the_real_engine(engine_host, generator):
    """Four levels behind sshd; the summary is what the generator says, and the settings are what the server says."""
    run = engine_host.run
    (engine_host.work / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    launch = run("launch", "--log-tag", "measured", "--no-smoke")
    assert launch.returncode == 0, launch.stderr

    code, result = measure(run, "--sweep", "1,2,4,8")
    assert (0, "complete", None) == (code, result["status"], result["error"])
    record = result["bench"]
    assert ("sglang.bench_serving", "0.5.12") == tuple(record["generator"].values())
    settings = record["settings"]
    assert ("0.5.12", 32, "torch_native", None) == tuple(
        settings[key]
        for key in ("engine_version", "max_running_requests", "attention_backend", "speculative_algorithm")
    )
    assert [] == record["warnings"]
    assert [(level, SENT, SENT, SENT * TOKENS) for level in (1, 2, 4, 8)] == [
        tuple(level[key] for key in ("concurrency", "sent", "completed", "output_tokens")) for level in record["levels"]
    ]

    folder = engine_host.sshd.home / ".deployctl" / "attempts" / "1" / "bench" / "1"
    assert record == json.loads((folder / "bench.json").read_text())
    # As the model's chat template has them, and without the token that the tokenizer itself puts in front.
    whole = "system: You answer in one word\nuser: What is the capital of France\nassistant: Paris\nuser: And of Italy\nassistant:"
    assert whole in [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for level in record["levels"]:
        raw = json.loads((folder / f"raw-c{level['concurrency']}.jsonl").read_text())
        assert level["concurrency"] == raw["max_concurrency"]
        assert (raw["output_throughput"], raw["duration"]) == (level["output_tok_per_s"], level["duration_s"])
        for name, label in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("itl_ms", "itl"), ("e2e_ms", "e2e_latency")):
            said = level[name]
            assert (raw[f"median_{label}_ms"], raw[f"p99_{label}_ms"]) == (said["p50"], said["p99"])
            assert said["p50"] <= said["p90"] <= said["p99"]
        assert sum(raw["output_lens"]) == SENT * TOKENS
