"""The two load generators: how each is started for one level, and how what it wrote is read.

SGLang is measured by its own `sglang.bench_serving`, everything else by guidellm
(https://github.com/vllm-project/guidellm). Neither is ever imported here: they are programs of the host.
"""

import json
import math
import os
import re

from .state import write_file

SGLANG, OPENAI = "sglang.bench_serving", "guidellm"
# sglang.bench_serving refuses a shorter output than this with its data set `custom`.
LEAST_TOKENS = 4
_MOST_ERRORS = 5
_ERROR_CHARACTERS = 300
_PROGRESS = re.compile(rb"(\d+)/(\d+) \[")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")
_LAST_WORDS = re.compile(
    rb"^(?:[\w.]*(?:Error|Exception|Interrupt)\b.*|.*[Nn]o module named.*|.*: error: .*)$", re.MULTILINE
)


class Target:
    """The server that is measured, and with what.

    Attributes:
        python: The interpreter that runs the generator.
        base_url: `http://host:port` of the server.
        headers: The server's authorization, or {}.
        model, tokenizer: As the server names them; the tokenizer is a path or a name.
        environment, cwd: Of the generator.
        folder: Of the bench: data sets, logs, raw results.
    """

    def __init__(self, *, python, base_url, headers, model, tokenizer, environment, cwd, folder):
        self.python = python
        self.base_url = base_url
        self.headers = headers
        self.model = model
        self.tokenizer = tokenizer
        self.environment = generator_environment(environment, headers, (model, tokenizer))
        self.cwd = cwd
        self.folder = folder

    def path(self, name):
        """A file of the bench."""
        return os.path.join(self.folder, name)


def generator_environment(environment, headers, paths):
    """The server's own environment, without proxies, with its key, and without a network where the model is a folder.

    Args:
        environment: Of the attempt, its mark included: `stop` must find a generator that was left over.
        headers: {"Authorization": "Bearer KEY"} or {}.
        paths: The model's and the tokenizer's path or name.
    """
    chosen = {name: value for name, value in environment.items() if name.lower() not in _PROXIES}
    chosen.update(NO_PROXY="*", no_proxy="*", PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    # Whatever key is set for some other service must not be sent to this one.
    for name in ("OPENAI_API_KEY", "API_KEY"):
        chosen.pop(name, None)
    if headers:
        chosen["OPENAI_API_KEY"] = headers["Authorization"].partition(" ")[2]
    if all(path and os.path.isdir(path) for path in paths):
        chosen.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    return chosen


# -- sglang.bench_serving ----------------------------------------------------------------------------------------------


class SglangBench:
    """`python -m sglang.bench_serving`, of the version that serves.

    Its data set `custom` takes one user turn a line and sends it as text to /generate, which answers with exact counts
    of tokens. Conversations are therefore rendered before, whole, by the model's chat template (`loadgen_render`).
    """

    name = SGLANG
    module = "sglang.bench_serving"
    raw_name = "raw-c%d.jsonl"
    hint = "the package of the host has no load generator: is `python` of this host the interpreter that serves?"
    renders = True

    def row(self, prompt):
        """A line of the data set; the second turn only has to be there."""
        return {"conversations": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "-"}]}

    def argv(self, target, load, concurrency, sent, data, raw):
        """The command line of one level.

        Args:
            target: The Target.
            load: {"max_tokens", "seed"}.
            concurrency: Requests at once, at most.
            sent: Requests in all.
            data: The data set's path.
            raw: The result's path.
        """
        words = [target.python, "-m", self.module, "--backend", "sglang", "--base-url", target.base_url]
        words += ["--dataset-name", "custom", "--dataset-path", data, "--num-prompts", str(sent)]
        words += ["--sharegpt-output-len", str(load["max_tokens"]), "--max-concurrency", str(concurrency)]
        words += ["--seed", str(load["seed"]), "--flush-cache", "--warmup-requests", "1"]
        words += ["--output-file", raw, "--output-details"]
        for flag, value in (("--model", target.model), ("--tokenizer", target.tokenizer)):
            if value:
                words += [flag, value]
        return words

    def completed(self, tail, sent):
        """How many requests are through, by the end of what it printed; None where that says nothing."""
        found = [int(match.group(1)) for match in _PROGRESS.finditer(tail) if int(match.group(2)) == sent]
        return found[-1] if found else None

    def read(self, raw):
        """The summary of a level from the result it wrote.

        Raises:
            OSError, ValueError, KeyError, TypeError: There is none, or it is of another shape.
        """
        with open(raw, encoding="utf-8") as source:
            lines = [line for line in source if line.strip()]
        found = json.loads(lines[-1])
        completed = int(found["completed"])
        errors = [error for error in found["errors"] if error]
        good = [number for number, error in enumerate(found["errors"]) if not error]
        ttfts = [1000 * found["ttfts"][number] for number in good]
        itls = [[1000 * gap for gap in found["itls"][number]] for number in good]
        lengths = [found["output_lens"][number] for number in good]
        # The time of the last token, as the generator measures a request, but for the end of the stream.
        ends = [first + sum(gaps) for first, gaps in zip(ttfts, itls)]
        tpots = [(end - first) / (n - 1) for end, first, n in zip(ends, ttfts, lengths) if n > 1]
        every_gap = [gap for gaps in itls for gap in gaps]
        summary = {
            "tried": len(found["errors"]),
            "completed": completed,
            "errors": distinct(errors),
            "duration_s": number_or_none(found.get("duration")),
            "input_tokens": number_or_none(found.get("total_input_tokens")),
            "output_tokens": number_or_none(found.get("total_output_tokens")),
            "output_tok_per_s": number_or_none(found.get("output_throughput")),
            "requests_per_s": number_or_none(found.get("request_throughput")),
            "accept_length": number_or_none(found.get("accept_length")),
        }
        for name, key, values in (
            ("ttft_ms", "ttft_ms", ttfts),
            ("tpot_ms", "tpot_ms", tpots),
            ("itl_ms", "itl_ms", every_gap),
            ("e2e_ms", "e2e_latency_ms", ends),
        ):
            given = {"mean": "mean_" + key, "p50": "median_" + key, "p90": "p90_" + key, "p99": "p99_" + key}
            computed = distribution(values)
            told = {part: number_or_none(found.get(label)) if values else None for part, label in given.items()}
            summary[name] = {part: computed[part] if told[part] is None else told[part] for part in given}
        return summary


# -- guidellm ----------------------------------------------------------------------------------------------------------


class GuideLlm:
    """`python -m guidellm`, for servers that are not SGLang: /v1/chat/completions, messages sent whole.

    Its TPOT counts the first token's wait in; what this project calls TPOT (as SGLang does) is its `inter token
    latency`, the mean of a request's gaps. Gaps one by one it does not tell.
    """

    name = OPENAI
    module = "guidellm"
    raw_name = "raw-c%d.json"
    hint = (
        "{python} -m pip install guidellm; or name another environment in the profile:"
        " bench: {{python: ~/bench-env/bin/python}}"
    )
    renders = False

    def row(self, prompt):
        """A line of the data set."""
        return {"messages": prompt}

    def argv(self, target, load, concurrency, sent, data, raw):
        """The command line of one level; see SglangBench.argv."""
        backend = {"kind": "openai_http", "target": target.base_url, "max_tokens": load["max_tokens"], "http2": False}
        # Servers differ in where their health is asked for, and it was asked for before.
        backend["validate_backend"] = False
        if target.model:
            backend["model"] = target.model
        if target.headers:
            backend["api_key"] = target.headers["Authorization"].partition(" ")[2]
        spec = {
            "backend": backend,
            "profile": {"kind": "concurrent", "streams": [concurrency]},
            "constraints": [{"kind": "max_requests", "count": sent}],
            "data": [{"kind": "json_file", "path": data}],
            "seed": {"kind": "static", "value": load["seed"]},
            "outputs": [{"kind": "json", "path": raw}],
        }
        # In a file and not on the command line, where everybody on the host could read the key.
        config = target.path("guidellm.json")
        text = json.dumps({"metadata": {"name": "deployctl"}, "spec": spec})
        write_file(config, text.encode("ascii"), 0o600)
        return [target.python, "-m", self.module, "run", "--config", config, "--disable-progress"]

    def completed(self, _tail, _sent):
        """Not told while it runs."""
        return

    def read(self, raw):
        """The summary of a level; see SglangBench.read."""
        with open(raw, encoding="utf-8") as source:
            found = json.load(source)["benchmarks"][0]
        metrics = found["metrics"]
        totals = metrics["request_totals"]
        completed = int(totals["successful"])
        failures = [failed.get("info") or {} for failed in (found.get("requests") or {}).get("errored") or []]
        duration_s = number_or_none(found.get("duration"))

        def total(name):
            value = metrics[name]["successful"] if metrics.get(name) else {}
            return number_or_none(value.get("total_sum")) if completed else None

        def spread(name, factor=1.0):
            value = (metrics[name]["successful"] if metrics.get(name) else None) or {}
            parts = dict(value.get("percentiles") or {}, mean=value.get("mean"))
            known = {
                part: number_or_none(parts.get(part)) if completed else None for part in ("mean", "p50", "p90", "p99")
            }
            return {part: None if one is None else one * factor for part, one in known.items()}

        written = total("output_token_count")
        return {
            "tried": completed + int(totals["errored"]) + int(totals.get("incomplete") or 0),
            "completed": completed,
            "errors": distinct([str(failure.get("error") or "no reason given") for failure in failures]),
            "duration_s": duration_s,
            "input_tokens": total("prompt_token_count"),
            "output_tokens": written,
            "output_tok_per_s": written / duration_s if written is not None and duration_s else None,
            "requests_per_s": completed / duration_s if duration_s else None,
            "accept_length": None,
            "ttft_ms": spread("time_to_first_token_ms"),
            "tpot_ms": spread("inter_token_latency_ms"),
            "itl_ms": distribution([]),
            "e2e_ms": spread("request_latency", 1000.0),
        }


def generator_for(engine):
    """The generator of an attempt's engine."""
    return SglangBench() if engine == "sglang" else GuideLlm()


# -- numbers and words -------------------------------------------------------------------------------------------------


def number_or_none(value):
    """A finite number, or None: an average over nothing is no number, and no zero either."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def distribution(values):
    """{"mean", "p50", "p90", "p99"} of some numbers, interpolated as numpy does; None where there are none."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[name] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return found


def distinct(errors):
    """The first few different errors, each in one line: of a traceback the last one says what went wrong."""
    found: list = []
    for error in errors:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["an error without a word"]
        line = lines[-1 if lines[0].startswith("Traceback ") else 0][:_ERROR_CHARACTERS]
        if line not in found:
            found.append(line)
        if len(found) == _MOST_ERRORS:
            break
    return found


def last_words(tail):
    """What a generator died of: the last error that it printed, else its last line."""
    found = _LAST_WORDS.findall(tail.replace(b"\r", b"\n"))
    lines = found or [line for line in tail.replace(b"\r", b"\n").split(b"\n") if line.strip()]
    return lines[-1].decode("utf-8", "backslashreplace").strip()[:_ERROR_CHARACTERS] if lines else ""
