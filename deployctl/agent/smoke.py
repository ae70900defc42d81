"""Does it answer well: one generation that must make sense, and many at once that must all come back."""

import http.client
import json
import re
import threading
import time

from . import attempts, crash, health
from .failure import EXIT_CRASHED, EXIT_SMOKE, EXIT_USAGE, Failure

_ONE_ANSWER_S = 120.0
_SETTLE_S = 10.0
_QUOTED = 200


def judge(text, expect):
    """Why a generated text is wrong, or None.

    Args:
        text: What the server generated; anything JSON can hold.
        expect: A regular expression, or "".
    """
    if not isinstance(text, str):
        return "the answer's text is %s, not text" % json.dumps(text)
    if not text.strip():
        return "the answer is empty"
    stripped = re.sub(r"\s+", "", text)
    if len(stripped) >= 8 and len(set(stripped)) == 1:
        return "the answer repeats one character: %s" % quote(text)
    words = text.split()
    if len(words) >= 8 and len(set(words)) == 1:
        return "the answer repeats one token: %s" % quote(text)
    if expect and not re.search(expect, text):
        return "the answer does not match %r: %s" % (expect, quote(text))
    return None


def quote(text):
    """The text as it may be shown: bounded, controls escaped."""
    shown = json.dumps(text[:_QUOTED], ensure_ascii=True)
    return shown + ("..." if len(text) > _QUOTED else "")


def ask(base, engine, smoke, headers, timeout_s, number=0):
    """One generation.

    Returns:
        (text, None) or (None or text, problem).
    """
    prompt = smoke["prompt"] + (" (%d)" % number if number else "")
    if engine == "sglang":
        attempts_at = [
            (
                "/generate",
                {"text": prompt, "sampling_params": {"max_new_tokens": smoke["max_tokens"], "temperature": 0}},
            )
        ]
    else:
        common = {"model": smoke.get("model") or "default", "max_tokens": smoke["max_tokens"], "temperature": 0}
        attempts_at = [
            ("/v1/completions", dict(common, prompt=prompt)),
            ("/v1/chat/completions", dict(common, messages=[{"role": "user", "content": prompt}])),
        ]
    for path, body in attempts_at:
        try:
            status, answer = health.request(base + path, "POST", body, timeout_s, headers)
        except (OSError, http.client.HTTPException) as error:
            return None, "%s: no answer: %s" % (path, error or type(error).__name__)
        if status == 404 and path == "/v1/completions":
            continue
        return _read(path, status, answer, smoke["expect"])
    return None, "neither /v1/completions nor /v1/chat/completions is served"


def _read(path, status, answer, expect):
    shown = quote(answer.decode("utf-8", "replace"))
    if status != 200:
        return None, "%s answered HTTP %d: %s" % (path, status, shown)
    try:
        value = json.loads(answer.decode("utf-8"))
    except ValueError:
        return None, "%s answered no JSON: %s" % (path, shown)
    try:
        if path == "/generate":
            text = value["text"]
        elif path == "/v1/completions":
            text = value["choices"][0]["text"]
        else:
            text = value["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None, "%s answered JSON of another shape: %s" % (path, shown)
    return (text if isinstance(text, str) else None), judge(text, expect)


def run(context, attempt, smoke, burst, watcher):
    """Smoke test a ready server, then a burst.

    Args:
        context: Of the operation.
        attempt: The attempt.
        smoke: {"prompt", "max_tokens", "expect"}.
        burst: How many at once; 0 for none.
        watcher: Has `tick()` (reads the log and the exit record) and `ended` (whether the server is gone for good).

    Returns:
        {"ok", "text", "seconds", "problem", "burst": {...}|None}.
    """
    base = health.base_of(attempt["ready"]["url"])
    headers = health.authorization(attempt["argv"])
    began = time.monotonic()
    outcome = {}
    one = threading.Thread(
        target=lambda: outcome.update(
            zip(("text", "problem"), ask(base, attempt["engine"], smoke, headers, _ONE_ANSWER_S))
        ),
        daemon=True,
    )
    one.start()
    _join([one], watcher, _ONE_ANSWER_S + 5, context)
    result = {
        "text": outcome.get("text"),
        "problem": outcome.get("problem", "no answer within %g s" % _ONE_ANSWER_S)
        if "text" not in outcome
        else outcome["problem"],
        "seconds": round(time.monotonic() - began, 3),
        "burst": None,
    }
    result["ok"] = result["problem"] is None
    context.wire.event(
        "smoke", ok=result["ok"], text=result["text"], problem=result["problem"], seconds=result["seconds"]
    )
    if result["ok"] and burst and not watcher.ended:
        result["burst"] = _burst(context, attempt, base, headers, smoke, burst, watcher)
        if result["burst"]["problem"]:
            result["ok"] = False
            result["problem"] = result["burst"]["problem"]
    return result


def _burst(context, attempt, base, headers, smoke, burst, watcher):
    bound_s = context.limit("burst_s", 120.0)
    context.wire.event("burst", state="start", sent=burst)
    answers = []
    barrier = threading.Barrier(burst)

    def one(number):
        try:
            barrier.wait(30)
        except threading.BrokenBarrierError:
            pass  # a machine too slow to start all threads at once still gets the requests
        began = time.monotonic()
        text, problem = ask(base, attempt["engine"], dict(smoke, expect=""), headers, bound_s, number + 1)
        answers.append(
            {"number": number, "seconds": round(time.monotonic() - began, 3), "problem": problem, "text": text}
        )

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(burst)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    _join(threads, watcher, bound_s + 5, context)
    seconds = time.monotonic() - began
    done = list(answers)
    failed = [answer for answer in done if answer["problem"]]
    missing = burst - len(done)
    problem = None
    if missing:
        problem = "%d of %d requests got no answer within %g s" % (missing, burst, bound_s)
    elif failed:
        problem = "%d of %d requests failed: %s" % (len(failed), burst, failed[0]["problem"])
    # A scheduler that died needs moments to take the server with it: health after the burst, or its end, decides.
    settled_by = time.monotonic() + _SETTLE_S
    while not watcher.ended and not context.wire.cancelled.is_set():
        watcher.tick()
        try:
            status, _ = health.request(attempt["ready"]["url"], timeout_s=health.HEALTH_TIMEOUT_S, headers=headers)
        except (OSError, http.client.HTTPException):
            status = 0
        watcher.tick()
        if status == 200 and not watcher.terminal:
            break
        if time.monotonic() > settled_by and not watcher.terminal:
            problem = problem or "the server is not healthy after the burst (HTTP %d)" % status
            break
        time.sleep(0.05)
    result = {
        "sent": burst,
        "answered": len(done) - len(failed),
        "failed": [{"number": one["number"], "problem": one["problem"]} for one in failed[:5]],
        "seconds": round(seconds, 3),
        "slowest_seconds": max([answer["seconds"] for answer in done] or [0.0]),
        "problem": problem,
    }
    context.wire.event("burst", state="done", **result)
    return result


def _join(threads, watcher, bound_s, context):
    """Wait for threads, the watcher ticking; ends early when the server is gone or nobody listens any more."""
    end = time.monotonic() + bound_s
    while any(thread.is_alive() for thread in threads):
        if watcher.ended or context.wire.cancelled.is_set() or time.monotonic() > end:
            # Requests to a dead server fail at once; give them that moment.
            for thread in threads:
                thread.join(0.2 if watcher.ended else 0.0)
                if not watcher.ended:
                    break
            return
        watcher.tick()
        time.sleep(0.02)


def smoke_operation(context):
    """Smoke (and burst) against the running server of an attempt."""
    from . import lock, watch  # noqa: PLC0415

    lock.reading(context)
    attempt = attempts.choose(context.state, context.args.get("attempt"))
    if not attempts.is_alive(attempt):
        raise Failure(
            "attempt %d (%s) is not running: %s" % (attempt["attempt"], attempt["log_tag"], attempts.state_of(attempt)),
            kind="not-running",
            hint="deployctl launch --log-tag TAG, or deployctl logs --crash",
            exit_code=EXIT_CRASHED if attempts.state_of(attempt) == attempts.CRASHED else EXIT_USAGE,
        )
    smoke = context.args.get("smoke") or attempt["smoke"]
    if smoke is None:
        raise Failure(
            "the profile %s has no smoke" % attempt["profile"],
            kind="no-smoke",
            hint="deployctl smoke --prompt TEXT",
            exit_code=EXIT_USAGE,
        )
    watcher = watch.Watcher(context, attempt, from_end=True)
    burst = context.args.get("burst")
    result = run(context, attempt, smoke, smoke.get("burst", 0) if burst is None else burst, watcher)
    watcher.settle()
    return watch.conclude_smoke(context, attempt, watcher, result)


__all__ = ["EXIT_SMOKE", "ask", "crash", "judge", "quote", "run", "smoke_operation"]
