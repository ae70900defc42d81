"""Real SGLang 0.5.12, measured by its own load generator: bench, compare and report of two attempts.

One story and one test: each start of the engine and each level of a sweep costs many seconds of CPU.
"""

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


def check_bench(engine_host, result):
    """Every level answered; the summary is what the generator says, and the settings are what the server says."""
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


def check_comparison(engine_host, value, shown):
    """The numbers are those of the benches, the differences those of the two command lines, and the unlike is said."""
    kept = engine_host.sshd.home / ".deployctl" / "attempts"
    records = [json.loads((kept / number / "bench" / "1" / "bench.json").read_text()) for number in "12"]
    for place, row in enumerate(value["levels"]):
        speeds = [record["levels"][place]["output_tok_per_s"] for record in records]
        assert speeds == [row["attempts"][label]["output_tok_per_s"] for label in ("t0", "t1")]
        assert speeds[1] / speeds[0] == row["attempts"]["t1"]["ratio"]
        assert all(level["ttft_ms"]["p50"] > 0 for level in row["attempts"].values())
    assert [1, 2, 4, 8] == [row["concurrency"] for row in value["levels"]]
    assert [("argument", "--max-running-requests", {"t0": "32", "t1": "2"})] == [
        (one["kind"], one["name"], one["values"]) for one in value["differences"]
    ]
    assert any("not like for like: max_running_requests: 32 against 2" in text for text in value["warnings"])
    assert {"weights", "ready"} <= {phase["name"] for phase in value["phases"]}
    assert all(seconds > 0 for seconds in value["phases"][-1]["seconds"].values())
    assert "as installed" in value["patch_diffs"][0]["note"]
    assert value["headlines"][0] in shown
    assert "argument --max-running-requests  32  2" in shown


def check_report(path):
    """One page with both attempts, their curves and what became of them."""
    told = json.loads(path.read_text().split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert ["t0", "t1"] == [attempt["name"] for attempt in told["attempts"]]
    (load,) = told["loads"]
    assert ["t0", "t1"] == [series["name"] for series in load["series"]]
    assert [1, 2, 4, 8] == load["levels"]
    assert all(level["tok"] > 0 for series in load["series"] for level in series["levels"].values())


def test_two_attempts_of_the_real_engine(engine_host, generator):
    """Behind sshd: launch, bench, another launch, bench, compare, report."""
    run = engine_host.run
    (engine_host.work / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    launched = run("launch", "--log-tag", "t0", "--no-smoke")
    assert launched.returncode == 0, launched.stderr
    code, result = measure(run, "--sweep", "1,2,4,8")
    assert (0, "complete", None) == (code, result["status"], result["error"])
    check_bench(engine_host, result)
    launched = run("launch", "--log-tag", "t1", "--no-smoke", "--replace", "--", "--max-running-requests", "2")
    assert launched.returncode == 0, launched.stderr
    code, result = measure(run, "--sweep", "1,2,4,8")
    assert (0, "complete", None) == (code, result["status"], result["error"])
    compared = run("compare", "t0", "t1", "--patch-diff", "--json")
    assert compared.returncode == 0, compared.stderr
    check_comparison(engine_host, json.loads(compared.stdout), run("compare", "t0", "t1").stdout)
    reported = run("report")
    assert reported.returncode == 0, reported.stderr
    check_report(engine_host.work / "report.html")
