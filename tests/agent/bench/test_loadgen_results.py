"""Results of the generators read into one shape, prompts rendered, environments made: each for itself, without servers."""

import json

import pytest

from deployctl.agent import loadgen, loadgen_render, serverinfo

# A result as sglang.bench_serving 0.5.12 writes it, shortened to what is read; two of three requests came back.
RESULT = {
    "max_concurrency": 2,
    "duration": 2.0,
    "completed": 2,
    "total_input_tokens": 20,
    "total_output_tokens": 6,
    "request_throughput": 1.0,
    "output_throughput": 3.0,
    "accept_length": None,
    "mean_e2e_latency_ms": 250.0,
    "median_e2e_latency_ms": 250.0,
    "p90_e2e_latency_ms": 290.0,
    "p99_e2e_latency_ms": 299.0,
    "mean_ttft_ms": 150.0,
    "median_ttft_ms": 150.0,
    "p99_ttft_ms": 199.0,
    "mean_tpot_ms": 50.0,
    "median_tpot_ms": 50.0,
    "p99_tpot_ms": 50.0,
    "mean_itl_ms": 50.0,
    "median_itl_ms": 50.0,
    "p99_itl_ms": 50.0,
    "output_lens": [3, 0, 3],
    "ttfts": [0.1, 0.0, 0.2],
    "itls": [[0.05, 0.05], [], [0.05, 0.05]],
    "errors": ["", "Traceback (most recent call last):\n  File\nConnectionResetError: cut", ""],
}


def read(tmp_path, result, generator=None):
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps({"completed": 999}) + "\n" + json.dumps(result) + "\n")
    return (generator or loadgen.SglangBench()).read(path)


def test_what_the_generator_tells_is_taken_and_the_rest_is_computed(tmp_path):
    """The last line counts; a percentile that is not given comes from the requests that succeeded."""
    found = read(tmp_path, RESULT)
    assert (3, 2, ["ConnectionResetError: cut"]) == (found["tried"], found["completed"], found["errors"])
    assert (2.0, 20, 6, 3.0, 1.0, None) == tuple(
        found[name]
        for name in (
            "duration_s",
            "input_tokens",
            "output_tokens",
            "output_tok_per_s",
            "requests_per_s",
            "accept_length",
        )
    )
    assert {"mean": 150.0, "p50": 150.0, "p90": pytest.approx(190.0), "p99": 199.0} == found["ttft_ms"]
    assert {"mean": 250.0, "p50": 250.0, "p90": 290.0, "p99": 299.0} == found["e2e_ms"]
    assert pytest.approx(50.0) == found["tpot_ms"]["p90"] == found["itl_ms"]["p90"]


def test_what_an_earlier_or_later_version_tells_differently(tmp_path):
    """0.5.9 has no p90 of the whole, 0.5.23 has one of everything: computed there, taken here."""
    older = {key: value for key, value in RESULT.items() if not key.startswith("p90")}
    assert pytest.approx(290.0) == read(tmp_path, older)["e2e_ms"]["p90"]
    assert 42.0 == read(tmp_path, dict(RESULT, p90_ttft_ms=42.0))["ttft_ms"]["p90"]


def test_over_nothing_there_is_no_number(tmp_path):
    """A level in which nothing came back has times of None, where the generator says 0 or NaN."""
    nothing = {**RESULT, "completed": 0, "total_output_tokens": 0, "output_throughput": 0.0, "mean_ttft_ms": 0.0}
    nothing.update(
        mean_e2e_latency_ms=float("nan"), output_lens=[0], ttfts=[0.0], itls=[[]], errors=["Bad Gateway: <html>\n"]
    )
    found = read(tmp_path, nothing)
    assert (0, ["Bad Gateway: <html>"]) == (found["completed"], found["errors"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert {None} == set(found[name].values()), name


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"completed": 1}', '{"completed": 1, "errors": [""], "ttfts": []}'])
def test_a_result_of_another_shape_is_an_error(tmp_path, broken):
    """Never a summary with holes in it."""
    path = tmp_path / "raw.jsonl"
    path.write_text(broken)
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        loadgen.SglangBench().read(path)


def test_a_report_of_guidellm_without_successes(tmp_path):
    """Its averages over nothing are no numbers either; its errors are told."""
    spread = {"successful": {"mean": 0.0, "total_sum": 0.0, "percentiles": {"p50": 0.0, "p90": 0.0, "p99": 0.0}}}
    names = (
        "time_to_first_token_ms",
        "inter_token_latency_ms",
        "request_latency",
        "output_token_count",
        "prompt_token_count",
    )
    metrics = {**dict.fromkeys(names, spread), "request_totals": {"successful": 0, "errored": 2}}
    errored = [{"info": {"error": "Connection refused"}}, {"info": {}}, {}]
    report = {"benchmarks": [{"metrics": metrics, "duration": 1.5, "requests": {"errored": errored}}]}
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(report))
    found = loadgen.GuideLlm().read(path)
    assert (0, ["Connection refused", "no reason given"]) == (found["completed"], found["errors"])
    assert (None, None) == (found["output_tok_per_s"], found["ttft_ms"]["p50"])
    metrics["request_totals"]["successful"] = 2
    metrics["inter_token_latency_ms"] = None
    path.write_text(json.dumps(report))
    assert {None} == set(loadgen.GuideLlm().read(path)["tpot_ms"].values())


def test_errors_are_few_different_and_short():
    """Five of them, in the order in which they came, one line each."""
    errors = ["a", "a", "b\nmore", "", "c" * 1000, "d", "e", "f"]
    assert ["a", "b", "an error without a word", "c" * 300, "d"] == loadgen.distinct(errors)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (b"noise\nValueError: output_len too small\n  1%|  | 1/8 [00:01", "ValueError: output_len too small"),
        (
            b"usage: x\nbench_serving.py: error: unrecognized arguments: --foo\n",
            "bench_serving.py: error: unrecognized arguments: --foo",
        ),
        (b"/usr/bin/python: No module named sglang\n", "/usr/bin/python: No module named sglang"),
        (b"Killed\n", "Killed"),
        (b"", ""),
        (
            b"aiohttp.client_exceptions.ClientConnectorError: \xff\n",
            "aiohttp.client_exceptions.ClientConnectorError: \\xff",
        ),
    ],
)
def test_what_a_generator_died_of(tail, said):
    """The last error that it printed, wherever its progress bar stands."""
    assert said == loadgen.last_words(tail)


def test_progress_is_that_of_this_level():
    """Other bars are drawn too, such as that of a download."""
    generator = loadgen.SglangBench()
    tail = b"Loading: 3/3 [00:00<00:00]\r 10%| | 1/16 [00:01<00:10]\r 50%| | 8/16 [00:02<00:02]\r 2/9 [x"
    assert (8, None) == (generator.completed(tail, 16), generator.completed(tail, 100))
    assert loadgen.GuideLlm().completed(tail, 16) is None


def test_the_environment_of_a_generator(tmp_path):
    """No proxies, no key of another service, no network where the model is a folder."""
    given = {"HTTPS_PROXY": "x", "all_proxy": "x", "OPENAI_API_KEY": "sk-other", "DEPLOYCTL_ATTEMPT": "m:1", "A": "b"}
    made = loadgen.generator_environment(given, {}, (str(tmp_path), str(tmp_path)))
    assert not {"HTTPS_PROXY", "all_proxy", "OPENAI_API_KEY"} & set(made)
    assert ("*", "1", "m:1", "b") == (made["NO_PROXY"], made["HF_HUB_OFFLINE"], made["DEPLOYCTL_ATTEMPT"], made["A"])
    named = loadgen.generator_environment(given, {"Authorization": "Bearer sesame"}, ("org/model", "org/model"))
    assert ("sesame", False) == (named["OPENAI_API_KEY"], "HF_HUB_OFFLINE" in named)
    assert "HF_HUB_OFFLINE" not in loadgen.generator_environment(given, {}, (str(tmp_path), None))


class Tokenizer:
    """A tokenizer as far as rendering goes."""

    def __init__(self, template="yes", bos="<s>", adds=True, refuses=()):
        self.chat_template, self.bos_token, self.bos_token_id = template, bos, 1
        self._adds, self._refuses = adds, refuses

    def encode(self, text):
        return [1, 5] if self._adds else [5]

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        roles = [message["role"] for message in messages]
        if set(roles) & set(self._refuses):
            raise ValueError("roles must alternate")
        return self.bos_token + "|".join(f"{m['role']}:{m['content']}" for m in messages) + "|assistant:"


TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "t"},
]


@pytest.mark.parametrize(
    ("tokenizer", "text", "note"),
    [
        (Tokenizer(), "system:s|user:u|assistant:a|tool:t|assistant:", ""),
        (Tokenizer(adds=False), "<s>system:s|user:u|assistant:a|tool:t|assistant:", ""),
        (Tokenizer(refuses=["tool", "system"]), "user:s\n\nu|assistant:a|user:t|assistant:", "sent as user turns"),
        (
            Tokenizer(refuses=["user"]),
            "system: s\n\nuser: u\n\nassistant: a\n\ntool: t\n\nassistant:",
            "sent as plain text",
        ),
        (Tokenizer(template=None), "system: s\n\nuser: u\n\nassistant: a\n\ntool: t\n\nassistant:", "no chat template"),
    ],
)
def test_a_conversation_is_rendered_whole(tokenizer, text, note):
    """By the template; where it refuses, in a form that it takes; the tokenizer's own first token is not doubled."""
    texts, said = loadgen_render.render([TALK], tokenizer)
    assert [text] == texts
    assert note in said
    assert bool(note) == bool(said)


def test_a_talk_that_begins_with_the_assistant_gets_a_user_first():
    """Templates that alternate want one."""
    turns = loadgen_render.simplified([{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}])
    assert ["user", "assistant", "user"] == [turn["role"] for turn in turns]
    assert "one" == loadgen_render.plain([{"role": "user", "content": "one"}])


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere/tokenizer.model"])
def test_rendering_without_a_tokenizer_says_so(tmp_path, capsys, path):
    """The prompts are there all the same, as plain text."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": TALK}) + "\n")
    loadgen_render.main(str(source), str(target), path)
    assert json.loads(target.read_text()).startswith("system: s")
    assert "no tokenizer of the model could be loaded" in capsys.readouterr().out
    assert [source, target] == sorted(tmp_path.iterdir())


def test_what_a_server_says_of_itself(monkeypatch):
    """What the scheduler allows counts, times the data-parallel ranks; an old or a silent server tells less."""
    answers = {}
    monkeypatch.setattr(serverinfo, "ask", lambda _base, path, _headers: answers.get(path))
    assert None is serverinfo.settings_of("sglang", "", {})["max_running_requests"]
    answers["/get_server_info"] = {"version": "0.5.9", "max_running_requests": 48, "tp_size": 8}
    old = serverinfo.settings_of("sglang", "", {})
    assert ("0.5.9", 48, 8, None) == tuple(
        old[name] for name in ("engine_version", "max_running_requests", "tp_size", "dtype")
    )
    answers["/server_info"] = {"dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 24}]}
    assert 48 == serverinfo.settings_of("sglang", "", {})["max_running_requests"]
    answers["/server_info"] = {"max_running_requests": True, "internal_states": ["odd"]}
    assert None is serverinfo.settings_of("sglang", "", {})["max_running_requests"]
    answers.update({"/version": {"version": "0.11"}, "/v1/models": {"data": [{"id": "m"}]}})
    other = serverinfo.settings_of("openai", "", {})
    assert ("openai", "0.11", "m") == (other["engine"], other["engine_version"], other["model_path"])
    answers["/v1/models"] = {"data": ["odd"]}
    assert None is serverinfo.settings_of("openai", "", {})["model_path"]


def test_what_guidellm_is_asked_for(tmp_path):
    """Everything in a file that only we can read, the server's key too; the command line says where it is."""
    target = loadgen.Target(
        python="/env/bin/python",
        base_url="http://127.0.0.1:8000",
        headers={"Authorization": "Bearer sesame"},
        model="m",
        tokenizer=None,
        environment={},
        cwd="/",
        folder=str(tmp_path),
    )
    load = {"max_tokens": 32, "seed": 5}
    generator = loadgen.generator_for("openai")
    argv = generator.argv(target, load, 4, 16, "/data.jsonl", "/raw.json")
    config = tmp_path / "guidellm.json"
    assert ["/env/bin/python", "-m", "guidellm", "run", "--config", str(config), "--disable-progress"] == argv
    assert 0o600 == config.stat().st_mode & 0o777
    spec = json.loads(config.read_text())["spec"]
    assert ("http://127.0.0.1:8000", "m", "sesame", 32) == tuple(
        spec["backend"][name] for name in ("target", "model", "api_key", "max_tokens")
    )
    assert ([4], 16, 5) == (spec["profile"]["streams"], spec["constraints"][0]["count"], spec["seed"]["value"])
    assert ("/data.jsonl", "/raw.json") == (spec["data"][0]["path"], spec["outputs"][0]["path"])
    assert {"messages": TALK} == generator.row(TALK)
    target.model, target.headers = None, {}
    generator.argv(target, load, 1, 1, "d", "r")
    assert not {"model", "api_key"} & set(json.loads(config.read_text())["spec"]["backend"])
