"""Two attempts of real SGLang 0.5.12, measured alike and set side by side."""

import json

PROMPTS = [{"prompt": "The capital of France is a city where people talk"}, {"prompt": "Write a list of rivers"}]
LOAD = "--sweep 1,2,4,8 --prompts own.jsonl --max-tokens 8 --requests-per-level 8".split()


def test_two_attempts_of_the_real_engine(engine_host, generator):
    """The numbers are those of the benches, the differences those of the two command lines, and the unlike is said."""
    run = engine_host.run
    (engine_host.work / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    for words in (
        ("launch", "--log-tag", "t0", "--no-smoke"),
        ("bench", *LOAD),
        ("launch", "--log-tag", "t1", "--no-smoke", "--replace", "--", "--max-running-requests", "2"),
        ("bench", *LOAD),
    ):
        done = run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run("compare", "t0", "t1", "--patch-diff", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
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
    shown = run("compare", "t0", "t1").stdout
    assert value["headlines"][0] in shown
    assert "argument --max-running-requests  32  2" in shown
