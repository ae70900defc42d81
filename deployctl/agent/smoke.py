"""Does it answer well: one generation that must make sense, and many at once that must all come back."""

import http.client
import json
import re
import threading
import time

from . import attempts, health, lock
from .failure import EXIT_CRASHED, EXIT_NOT_READY, EXIT_USAGE, Failure
from .watcher import SETTLE_S, TICK_S, Watcher

_ANSWER_S = 120.0
# After a burst or a failed smoke: so long the server must stay well, and so long it may take to be well again. One that
# dies closes its sockets at once and may take long to give its GPU memory back before it is gone.
_LINGER_S = 1.0
_UNWELL_S = 30.0
_QUOTED = 200
_MOST_AT_ONCE = 4096
# The shortest repetition that is no accident: `++++`.
_REPEATS = 4
_TOKEN_CHARACTERS = 12


def judge(text, expect):
    """Why a generated text is wrong, or None.

    A broken kernel shows as one token repeated to the end (https://github.com/sgl-project/sglang/issues/24321).

    Args:
        text: What the server generated; anything JSON can hold.
        expect: A regular expression, or "".
    """
    if not isinstance(text, str):
        return "the answer's text is %s, not text" % json.dumps(text)
    if not text.strip():
        return "the answer is empty" if not text else "the answer is blank: %s" % quote(text)
    token = _repeated(text)
    if token is not None:
        return "the answer repeats one token, %s: %s" % (quote(token), quote(text))
    if expect and not re.search(expect, text):
        return "the answer does not match %r: %s" % (expect, quote(text))
    return None


def _repeated(text):
    """The token that makes up the whole text, at least four times, or None; the last one may be cut off."""
    words = text.split()
    if len(words) >= _REPEATS and len(set(words)) == 1:
        return words[0]
    run = "".join(words)
    for size in range(1, min(_TOKEN_CHARACTERS, len(run) // _REPEATS) + 1):
        token = run[:size]
        # Letters that happen to stand in words of different lengths make no token: blanks must repeat as well.
        if run == (token * (len(run) // size + 1))[: len(run)] and (len(words) == 1 or len(set(run)) == 1):
            return token
    return None


def quote(text):
    """The text as it may be shown: bounded, controls escaped."""
    shown = json.dumps(text[:_QUOTED], ensure_ascii=True)
    return shown + ("..." if len(text) > _QUOTED else "")


def check(smoke):
    """Refuse what could only fail after the load.

    Raises:
        Failure: `expect` is no regular expression, or `burst` no number that can be sent at once (exit 2).
    """
    try:
        re.compile(smoke.get("expect") or "")
    except re.error as error:
        raise Failure(
            "smoke.expect is no regular expression: %s" % error,
            kind="usage",
            hint="escape ( [ . * + ? { | \\ with a backslash",
            exit_code=EXIT_USAGE,
        ) from error
    check_burst(smoke.get("burst") or 0)


def check_burst(burst):
    """Refuse a burst that cannot be sent at once (exit 2)."""
    if not 0 <= burst <= _MOST_AT_ONCE:
        raise Failure("a burst of %d: 0 to %d can be sent at once" % (burst, _MOST_AT_ONCE), exit_code=EXIT_USAGE)


class _Questions:
    """How to ask one server: where, in which dialect, with which key and model."""

    def __init__(self, attempt, smoke, timeout_s):
        self._base = health.base_of(attempt["ready"]["url"])
        self._headers = health.authorization(attempt["argv"])
        self._smoke = smoke
        self._sglang = attempt["engine"] == "sglang"
        self._timeout_s = timeout_s
        self._model = smoke.get("model")

    def ask(self, number=0):
        """One generation; `number` makes its prompt another one.

        Returns:
            (text or None, problem or None): never raises, what goes wrong is the problem.
        """
        prompt = self._smoke["prompt"] + (" (%d)" % number if number else "")
        expect = "" if number else self._smoke.get("expect") or ""
        try:
            for path, body in self._bodies(prompt):
                status, answer = self._post(path, body)
                if status != 404 or path != "/v1/completions":
                    return _read(path, status, answer, expect)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return None, "%s: no answer: %s" % (self._base, error or type(error).__name__)
        return None, "neither /v1/completions nor /v1/chat/completions is served"

    def _bodies(self, prompt):
        most = self._smoke["max_tokens"]
        if self._sglang:
            yield "/generate", {"text": prompt, "sampling_params": {"max_new_tokens": most, "temperature": 0}}
            return
        common = {"model": self._model_name(), "max_tokens": most, "temperature": 0}
        yield "/v1/completions", dict(common, prompt=prompt)
        yield "/v1/chat/completions", dict(common, messages=[{"role": "user", "content": prompt}])

    def _post(self, path, body):
        return health.request(self._base + path, "POST", body, self._timeout_s, self._headers)

    def _model_name(self):
        """What the server calls its model: the first of its list, asked once."""
        if self._model is None:
            self._model = "default"
            status, answer = health.request(self._base + "/v1/models", timeout_s=self._timeout_s, headers=self._headers)
            if status == 200:
                try:
                    self._model = str(json.loads(answer.decode("utf-8"))["data"][0]["id"])
                except (ValueError, LookupError, TypeError):
                    pass  # a server with one model takes any name
        return self._model


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
    except (LookupError, TypeError):
        return None, "%s answered JSON of another shape: %s" % (path, shown)
    return (text if isinstance(text, str) else None), judge(text, expect)


def run(context, attempt, smoke, burst, watcher):
    """Smoke test a ready server, then a burst.

    Args:
        context: Of the operation.
        attempt: The attempt.
        smoke: {"prompt", "max_tokens", "expect"}.
        burst: How many at once; 0 for none.
        watcher: The attempt's Watcher: a server that dies meanwhile ends the waiting.

    Returns:
        {"ok", "text", "seconds", "problem", "burst": {...}|None}.
    """
    bound_s = context.limit("burst_s", _ANSWER_S)
    questions = _Questions(attempt, smoke, bound_s)
    answers, seconds = _ask_at_once(context, questions, [0], watcher, bound_s)
    text, problem = answers[0][:2] if 0 in answers else (None, "no answer within %g s" % bound_s)
    result = {"ok": problem is None, "text": text, "problem": problem, "seconds": seconds, "burst": None}
    context.wire.event("smoke", ok=result["ok"], text=text, problem=problem, seconds=seconds)
    if result["ok"] and burst and not watcher.ended and not context.wire.cancelled.is_set():
        context.wire.event("burst", state="start", sent=burst)
        result["burst"] = _burst(context, attempt, questions, burst, watcher)
        context.wire.event("burst", state="done", **result["burst"])
        result["problem"] = result["burst"]["problem"]
        result["ok"] = result["problem"] is None
    elif not result["ok"]:
        # A request that fails may be the server's last: what is said of it must wait until that is known.
        unwell = _unwell_after(context, attempt, watcher, "smoke")
        if unwell is not None:
            result["problem"] += "; " + unwell
    return result


def _burst(context, attempt, questions, burst, watcher):
    bound_s = context.limit("burst_s", _ANSWER_S)
    answers, seconds = _ask_at_once(context, questions, range(1, burst + 1), watcher, bound_s)
    failed = [(number, answers[number][1]) for number in sorted(answers) if answers[number][1]]
    missing = burst - len(answers)
    problem = None
    if missing:
        problem = "%d of %d requests got no answer within %g s" % (missing, burst, bound_s)
        if context.wire.cancelled.is_set():
            problem = "cancelled"
    elif failed:
        problem = "%d of %d requests failed: %s" % (len(failed), burst, failed[0][1])
    unwell = _unwell_after(context, attempt, watcher, "burst")
    return {
        "sent": burst,
        "answered": len(answers) - len(failed),
        "failed": [{"number": number, "problem": why} for number, why in failed[:5]],
        "seconds": seconds,
        "slowest_seconds": max([answer[2] for answer in answers.values()] or [0.0]),
        "problem": problem or unwell,
    }


def _ask_at_once(context, questions, numbers, watcher, bound_s):
    """Ask so many questions at the same moment, the watcher ticking meanwhile.

    Returns:
        ({number: (text, problem, seconds)} of those that came back, seconds until the last).
    """
    answers = {}
    barrier = threading.Barrier(len(numbers))

    def one(number):
        try:
            barrier.wait(30)
        except threading.BrokenBarrierError:
            pass  # a machine too slow to start all threads at once still sends the requests
        began = time.monotonic()
        text, problem = questions.ask(number)
        answers[number] = (text, problem, round(time.monotonic() - began, 3))

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
    began = time.monotonic()
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        barrier.abort()  # the system gives no more threads; those without an answer are counted as missing
    while any(thread.is_alive() for thread in threads):
        if watcher.ended or context.wire.cancelled.is_set() or time.monotonic() - began > bound_s + 5:
            break
        watcher.tick()
        time.sleep(TICK_S)
    if watcher.ended:
        # Requests to a dead server fail at once: given that moment, they are counted as failed and not as missing.
        finish = time.monotonic() + 0.5
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, finish - time.monotonic()))
    return dict(answers), round(time.monotonic() - began, 3)


def _unwell_after(context, attempt, watcher, what):
    """Why the server is not well after a burst or a failed smoke (`what`), or None.

    A server closes its sockets before it is gone, a scheduler that dies at a batch size needs moments to take the
    server with it, and an engine without a watchdog lives on without: the health answer, the log, and the ranks must
    all be good for a while.
    """
    probe = health.Probe(attempt["ready"]["url"], health.authorization(attempt["argv"]))
    began = time.monotonic()
    unwell_since = None
    try:
        while not watcher.ended and not context.wire.cancelled.is_set():
            watcher.tick(look_at_ranks=True)
            now = time.monotonic()
            if probe.status == 200 and not watcher.doomed:
                unwell_since = None
                if now - began >= _LINGER_S and probe.answers > 1:
                    return None
            elif probe.status is not None and not watcher.doomed:
                unwell_since = unwell_since or now
                if now - unwell_since > _UNWELL_S:
                    return "the server is not healthy after the %s (%s)" % (
                        what,
                        "HTTP %d" % probe.status if probe.status else "it does not answer",
                    )
            if now - began > SETTLE_S:
                return "the server is dying and does not end"
            time.sleep(TICK_S)
    finally:
        probe.stop()
    return "the server died of the %s" % what if watcher.ended else "cancelled"


def smoke_operation(context):
    """Smoke (and burst) against the running server of an attempt."""
    from . import watch

    lock.reading(context)
    attempt = running(context)
    smoke = context.args.get("smoke") or attempt["smoke"]
    if smoke is None:
        raise Failure(
            "the profile %s has no smoke" % attempt["profile"],
            kind="no-smoke",
            hint="deployctl smoke --prompt TEXT",
            exit_code=EXIT_USAGE,
        )
    check(smoke)
    burst = context.args.get("burst")
    burst = smoke.get("burst", 0) if burst is None else burst
    check_burst(burst)
    watcher = Watcher(context, attempt, from_end=True)
    return watch.conclude_smoke(context, attempt, watcher, run(context, attempt, smoke, burst, watcher))


def running(context):
    """The attempt that is meant: the named one, else the newest that lives; it must be serving.

    Raises:
        Failure: It is not running (exit 6 where it crashed), not ready (5), or serves nothing itself (2).
    """
    number, tag = context.args.get("attempt"), context.args.get("log_tag")
    living = [] if number is not None or tag is not None else attempts.live(context.state)
    attempt = living[-1] if living else attempts.choose(context.state, number, tag)
    state = attempts.state_of(attempt)
    if not attempts.is_alive(attempt):
        raise Failure(
            "attempt %d (%s) is not running: %s" % (attempt["attempt"], attempt["log_tag"], state),
            kind="not-running",
            hint="deployctl launch --log-tag TAG, or deployctl logs --crash",
            exit_code=EXIT_CRASHED if state == attempts.CRASHED else EXIT_USAGE,
        )
    if state == attempts.CRASHED:
        # Its launcher may live on and answer health checks without a scheduler: a request would wait for ever.
        crash = (attempt["verdict"] or {}).get("crash")
        raise Failure(
            "attempt %d (%s) has crashed: %s"
            % (attempt["attempt"], attempt["log_tag"], crash["cause"] if crash else "see its log"),
            kind="crashed",
            hint="what is left of it still runs: deployctl stop; deployctl logs --crash --attempt %d"
            % attempt["attempt"],
            exit_code=EXIT_CRASHED,
            crash=crash,
        )
    if attempt["rank"] > 0:
        raise Failure(
            "attempt %d is rank %d of its server, which answers nothing" % (attempt["attempt"], attempt["rank"]),
            kind="not-rank-0",
            hint="deployctl %s --host HOST-OF-RANK-0" % context.operation,
            exit_code=EXIT_USAGE,
        )
    if (attempt["verdict"] or {}).get("ready_seconds") is None:
        try:
            status, _ = health.request(attempt["ready"]["url"], headers=health.authorization(attempt["argv"]))
        except (OSError, http.client.HTTPException):
            status = 0
        if status != 200:
            raise Failure(
                "attempt %d (%s) is not ready" % (attempt["attempt"], attempt["log_tag"]),
                kind="not-ready",
                hint="deployctl wait follows it to ready, and smokes it",
                exit_code=EXIT_NOT_READY,
            )
    return attempt
