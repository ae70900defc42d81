"""The engine's load generator: the flags that matter, the requests as it sends them, and its result file.

    python -m sglang.bench_serving --backend sglang --dataset-name custom --dataset-path FILE --max-concurrency 8
"""

import argparse
import http.client
import json
import math
import os
import queue
import random
import sys
import threading
import time
import traceback
from urllib.parse import urlsplit

TIMEOUT_S = 6 * 60 * 60


class Output:
    """What one request came to; times in seconds."""

    def __init__(self, prompt_len):
        self.prompt_len = prompt_len
        self.generated_text, self.error = "", ""
        self.success = False
        self.latency = self.ttft = 0.0
        self.itl = []
        self.output_len = 0


class Progress:
    """The bar on stderr, as tqdm draws it."""

    def __init__(self, total, disabled):
        self.total, self.disabled = total, disabled
        self.count, self.began = 0, time.monotonic()
        self.lock = threading.Lock()

    def update(self):
        with self.lock:
            self.count += 1
            if not self.disabled:
                elapsed = time.monotonic() - self.began
                share = 100 * self.count // self.total
                text = "\r%3d%%|          | %d/%d [00:%02d<00:00, %.2fit/s]"
                sys.stderr.write(text % (share, self.count, self.total, elapsed, self.count / max(elapsed, 1e-9)))
                sys.stderr.flush()


def load_custom(args):
    """The data set `custom`: the first turn of each conversation, shuffled by the seed."""
    if args.sharegpt_output_len is None or args.sharegpt_output_len < 4:
        raise ValueError("output_len too small")
    prompts = []
    with open(args.dataset_path, encoding="utf-8") as lines:
        for line in lines:
            turns = json.loads(line).get("conversations", []) if line.strip() else []
            if len(turns) >= 2:
                prompts.append(turns[0].get("content", turns[0].get("value", "")))
    random.shuffle(prompts)
    prompts = [prompt for prompt in prompts if len(prompt.split()) >= 2]
    return [(prompt, len(prompt.split())) for prompt in prompts[: args.num_prompts]]


def ask(args, prompt, prompt_len, most):
    """One streamed request to /generate; what goes wrong stands in its output."""
    output = Output(prompt_len)
    target = urlsplit(args.base_url)
    sampling = {"temperature": 0.0, "max_new_tokens": most, "ignore_eos": not args.disable_ignore_eos}
    body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True})
    began = last = time.perf_counter()
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/generate", body, args.headers)
        response = connection.getresponse()
        if response.status != 200:
            output.error = "%s: %s" % (response.reason, response.read().decode("utf-8", "replace"))
            return output
        done = False
        for line in response:
            chunk = line.strip()
            output.latency = time.perf_counter() - began
            if chunk == b"data: [DONE]":
                done = True
            elif chunk:
                value = json.loads(chunk[len(b"data: ") :].decode("utf-8"))
                now, count = time.perf_counter(), value["meta_info"]["completion_tokens"]
                if not output.ttft:
                    output.ttft = now - began
                elif count > output.output_len:
                    new = count - output.output_len
                    output.itl.extend([(now - last) / new] * new)
                last, output.output_len, output.generated_text = now, count, value["text"]
        if not done:
            raise ConnectionError("Response payload is not completed")
        output.success = True
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        output.error = traceback.format_exc()
    finally:
        connection.close()
    return output


def get(args, path):
    """The JSON object of a GET, {} where there is none."""
    target = urlsplit(args.base_url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
    try:
        connection.request("GET", path, headers=args.headers)
        response = connection.getresponse()
        content = response.read()
        return json.loads(content.decode("utf-8")) if response.status == 200 else {}
    finally:
        connection.close()


def flush_cache(args):
    target = urlsplit(args.base_url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
    connection.request("POST", "/flush_cache", "", args.headers)
    connection.getresponse().read()
    connection.close()


def percentile(values, share):
    """As numpy interpolates; 0 over nothing."""
    ordered = sorted(values) or [0.0]
    place = share / 100.0 * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def mean(values):
    return sum(values) / len(values) if values else 0.0


def summary(args, rows, outputs, duration_s, accept_length):
    """The line of the result file."""
    good = [output for output in outputs if output.success]
    written = sum(output.output_len for output in good)
    result = {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "inf",
        "max_concurrency": args.max_concurrency,
        "sharegpt_output_len": args.sharegpt_output_len,
        "duration": duration_s,
        "completed": len(good),
        "total_input_tokens": sum(row[1] for row, output in zip(rows, outputs) if output.success),
        "total_output_tokens": written,
        "request_throughput": len(good) / duration_s,
        "output_throughput": written / duration_s,
        "accept_length": accept_length,
    }
    measured = {
        "e2e_latency": [output.latency for output in good],
        "ttft": [output.ttft for output in good],
        "tpot": [(out.latency - out.ttft) / (out.output_len - 1) for out in good if out.output_len > 1],
        "itl": [gap for output in good for gap in output.itl],
    }
    for name, values in measured.items():
        # Over nothing the engine's numpy says nan for the whole latency, and 0 for the rest.
        missing = math.nan if name == "e2e_latency" and not values else None
        for label, value in (
            ("mean", mean(values)),
            ("median", percentile(values, 50)),
            ("p99", percentile(values, 99)),
        ):
            result["%s_%s_ms" % (label, name)] = 1000 * value if missing is None else missing
    result["p90_e2e_latency_ms"] = 1000 * percentile(measured["e2e_latency"], 90)
    if args.output_details:
        result["input_lens"] = [output.prompt_len for output in outputs]
        result["output_lens"] = [output.output_len if output.success else 0 for output in outputs]
        result["ttfts"] = [output.ttft for output in outputs]
        result["itls"] = [output.itl for output in outputs]
        result["generated_texts"] = [output.generated_text for output in outputs]
        result["errors"] = [output.error for output in outputs]
    return result


def run(args):
    """Warm up, send everything, write the result."""
    random.seed(args.seed)
    rows = load_custom(args)
    print("#Input tokens: %d" % sum(row[1] for row in rows))
    print("Starting warmup with %d sequences..." % args.warmup_requests)
    warmups = [ask(args, *rows[0], min(args.sharegpt_output_len, 32)) for _ in range(args.warmup_requests)]
    if warmups and not any(output.success for output in warmups):
        raise ValueError(
            "Warmup failed - Please make sure benchmark arguments are correctly specified. Error: %s" % warmups[0].error
        )
    if args.flush_cache:
        flush_cache(args)
    outputs = [None] * len(rows)
    waiting = queue.Queue()
    for number, row in enumerate(rows):
        waiting.put((number, row))
    progress = Progress(len(rows), args.disable_tqdm)

    def work():
        while True:
            try:
                number, row = waiting.get_nowait()
            except queue.Empty:
                return
            outputs[number] = ask(args, *row, args.sharegpt_output_len)
            progress.update()

    began = time.perf_counter()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(args.max_concurrency or len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    duration_s = time.perf_counter() - began
    states = get(args, "/server_info").get("internal_states") or [{}]
    result = summary(args, rows, outputs, duration_s, states[0].get("avg_spec_accept_length"))
    print("\n%s\nSuccessful requests: %d" % (" Serving Benchmark Result ".center(50, "="), result["completed"]))
    with open(args.output_file, "a", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")


def main():
    parser = argparse.ArgumentParser(description="Benchmark the online serving throughput.")
    parser.add_argument("--backend", default="sglang", choices=["sglang"])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--dataset-name", default="custom", choices=["custom"])
    parser.add_argument("--dataset-path", default="")
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--sharegpt-output-len", type=int)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--output-file", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup-requests", type=int, default=1)
    for flag in ("--output-details", "--disable-tqdm", "--disable-ignore-eos", "--flush-cache"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY")
    args.headers = {"Content-Type": "application/json"}
    if key:
        args.headers["Authorization"] = "Bearer " + key
    run(args)


if __name__ == "__main__":
    main()
