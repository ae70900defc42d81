"""What the HTTP server answers."""

import dataclasses
import http
import http.server
import json
import os
import threading
import time

from sglang.srt.entrypoints.engine import STARTING, UNHEALTHY, UP, Disconnected
from sglang.srt.utils import access_log, log
from sglang.version import __version__

MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
HEALTH = ("/health", "/health_generate")
READ = (*MODEL_INFO, *SERVER_INFO, *HEALTH, "/v1/models")
WRITE = ("/generate", "/v1/completions", "/v1/chat/completions")
FLUSH = "/flush_cache"


class BadRequest(Exception):
    """What the client sent is wrong; the text says what."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine = None

    def log_message(self, format, *args):
        pass

    def answer(self, status, value=b"", content_type=None):
        body = value if isinstance(value, bytes) else json.dumps(value).encode("utf-8")
        content_type = content_type or ("text/plain" if isinstance(value, bytes) else "application/json")
        access_log(
            '%s:%d - "%s %s HTTP/1.1" %d %s'
            % (*self.client_address[:2], self.command, self.path, status, http.HTTPStatus(status).phrase)
        )
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self):
        key = self.engine.server_args.api_key
        if key is None or self.headers.get("Authorization") == "Bearer " + key:
            return False
        self.answer(401, {"error": "Unauthorized"})
        return True

    # -- GET -----------------------------------------------------------------------------------------------------------

    def do_GET(self):
        if self.refused():
            return
        args = self.engine.server_args
        path = self.path.partition("?")[0]
        if path in HEALTH:
            self.answer(self.health())
        elif path in MODEL_INFO:
            self.answer(200, model_info(args))
        elif path in SERVER_INFO:
            info = dict(dataclasses.asdict(args), version=__version__, internal_states=[self.internal_state()])
            self.answer(200, dict(info, **self.engine.scheduler_info))
        elif path == FLUSH:
            self.flush()
        elif path == "/v1/models":
            name = args.served_model_name
            model = {"id": name, "object": "model", "owned_by": "sglang", "root": name}
            self.answer(200, {"object": "list", "data": [model]})
        else:
            self.not_for_this(path)

    def not_for_this(self, path):
        """The path is not there, or not for this method."""
        if path in (*READ, *WRITE, FLUSH):
            self.answer(405, {"detail": "Method Not Allowed"})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_other(self):
        # A body that may follow must not be read as the next request.
        self.close_connection = True
        if not self.refused():
            self.not_for_this(self.path.partition("?")[0])

    do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_other

    def health(self):
        """The status that /health answers with; it generates one token."""
        engine = self.engine
        if engine.gracefully_exit or engine.server_status == STARTING:
            return 503
        if engine.server_args.standin_mode == "slowhealth":
            time.sleep(engine.server_args.standin_health_delay)
        if engine.server_args.standin_mode == "dead200":
            return 200
        timeout_s = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        if engine.generate("", 1, kind="health", timeout_s=timeout_s) is not None:
            engine.server_status = UP
            return 200
        log("Health check failed. Server couldn't get a response from detokenizer for last %g seconds." % timeout_s)
        engine.server_status = UNHEALTHY
        return 503

    def internal_state(self):
        engine, args = self.engine, self.engine.server_args
        state = {"effective_max_running_requests_per_dp": args.max_running_requests}
        if args.speculative_algorithm and engine.forward_ct:
            state["avg_spec_accept_length"] = engine.decoded_tokens / float(engine.forward_ct)
        return state

    def flush(self):
        """There is no cache; what is counted begins anew."""
        busy = bool(self.engine.rid_to_state)
        if not busy:
            self.engine.decoded_tokens = self.engine.forward_ct = 0
        self.answer(400 if busy else 200, b"Cache flushed.\n" if not busy else b"Flush cache failed.\n")

    # -- POST ----------------------------------------------------------------------------------------------------------

    def do_POST(self):
        length = self.headers.get("Content-Length", "0")
        chunked = "Transfer-Encoding" in self.headers
        if chunked or not (length.isascii() and length.isdigit()):
            # Where the body ends and the next request begins cannot be told.
            self.close_connection = True
            return self.answer(411 if chunked else 400, {"detail": "a Content-Length is needed"})
        body = self.rfile.read(int(length))
        if self.refused():
            return
        path = self.path.partition("?")[0]
        if path == FLUSH:
            return self.flush()
        if path not in WRITE:
            return self.not_for_this(path)
        route = dict(zip(WRITE, (self.generate, self.completions, self.chat_completions)))[path]
        try:
            value = json.loads(body.decode("utf-8"))
            if not isinstance(value, dict):
                raise BadRequest("the body must be a JSON object")
            if value.get("stream"):
                return self.stream(path, value)
            answer = route(value)
        except (ValueError, RecursionError, BadRequest) as error:
            return self.answer(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        except Disconnected:
            self.close_connection = True
            return
        if self.engine.server_args.standin_mode == "html" and self.engine.server_status != STARTING:
            return self.answer(200, b"<!DOCTYPE html><html><body><h1>It works!</h1></body></html>", "text/html")
        self.answer(200, answer)

    def stream(self, path, body):
        """One answer as server-sent events, a chunk whenever tokens have come."""
        if path == "/generate":
            prompt, most = body.get("text"), (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        elif path == "/v1/completions":
            prompt, most = body.get("prompt"), body.get("max_tokens", 16)
        else:
            prompt = conversation(body)
            most = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        if not isinstance(prompt, str):
            raise BadRequest("a stream needs one prompt, as a string")
        check_max_new_tokens(most)
        access_log(
            '%s:%d - "%s %s HTTP/1.1" 200 OK' % (*self.client_address[:2], self.command, self.path)
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        # The end of the connection is the end of the stream.
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        try:
            sent = 0
            for answer in self.engine.stream(prompt, most, connection=self.connection):
                for chunk in chunks(path, body, self.engine.server_args.served_model_name, answer, sent):
                    self.wfile.write(b"data: " + json.dumps(chunk).encode("utf-8") + b"\n\n")
                sent = len(answer["text"])
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client went away; the request was aborted

    def run(self, prompts, max_new_tokens):
        """Run prompts together; the answers in their order."""
        check_max_new_tokens(max_new_tokens)
        kind = "warmup" if self.engine.server_status == STARTING else "generate"
        answers = [None] * len(prompts)
        failures = []

        def one(number, prompt):
            try:
                answers[number] = self.engine.generate(prompt, max_new_tokens, kind, connection=self.connection)
            except Disconnected as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=item, daemon=True) for item in enumerate(prompts[1:], 1)]
        for thread in threads:
            thread.start()
        one(0, prompts[0])
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return answers

    def shown(self, answer):
        """An answer's text, as the mode shows it."""
        spoilt = {"garbage": "++++" * 50, "empty": "", "nulltext": None}
        mode = self.engine.server_args.standin_mode
        return spoilt[mode] if mode in spoilt and self.engine.server_status != STARTING else answer["text"]

    def generate(self, body):
        text = body.get("text")
        prompts = text if isinstance(text, list) else [text]
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise BadRequest("text must be a string or a list of strings")
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise BadRequest("sampling_params must be an object")
        results = [
            {
                "text": self.shown(answer),
                "output_ids": answer["output_ids"],
                "meta_info": {
                    "id": os.urandom(16).hex(),
                    "finish_reason": {"type": "length", "length": len(answer["output_ids"])},
                    "prompt_tokens": answer["prompt_tokens"],
                    "completion_tokens": len(answer["output_ids"]),
                    "cached_tokens": 0,
                },
            }
            for answer in self.run(prompts, sampling.get("max_new_tokens", 128))
        ]
        return results if isinstance(text, list) else results[0]

    def completions(self, body):
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise BadRequest("prompt must be a string or a list of strings")
        answers = self.run(prompts, body.get("max_tokens", 16))
        choices = [
            {"index": number, "text": self.shown(answer), "logprobs": None, "finish_reason": "length"}
            for number, answer in enumerate(answers)
        ]
        return self.completion("text_completion", choices, answers)

    def chat_completions(self, body):
        answers = self.run([conversation(body)], body.get("max_completion_tokens") or body.get("max_tokens") or 128)
        message = {"role": "assistant", "content": self.shown(answers[0]), "tool_calls": None}
        choices = [{"index": 0, "message": message, "finish_reason": "length"}]
        return self.completion("chat.completion", choices, answers)

    def completion(self, kind, choices, answers):
        read = sum(answer["prompt_tokens"] for answer in answers)
        written = sum(len(answer["output_ids"]) for answer in answers)
        return {
            "id": os.urandom(16).hex(),
            "object": kind,
            "created": int(time.time()),
            "model": self.engine.server_args.served_model_name,
            "choices": choices,
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }


def check_max_new_tokens(most):
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadRequest("max_new_tokens must be at least 1, got %r" % (most,))


def conversation(body):
    """The prompt of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequest("messages must be a list of objects")
    return "\n".join(str(message.get("content")) for message in messages)


def chunks(path, body, model, answer, sent):
    """The events of a stream for an answer of which `sent` characters are out: whole text by /generate, else the rest."""
    read, written = answer["prompt_tokens"], len(answer["output_ids"])
    if path == "/generate":
        reason = {"type": "length", "length": written} if answer["finished"] else None
        about = {"id": "", "finish_reason": reason, "prompt_tokens": read, "completion_tokens": written}
        yield {"text": answer["text"], "output_ids": answer["output_ids"], "meta_info": about}
        return
    chat = path == "/v1/chat/completions"
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": "", "object": kind, "created": int(time.time()), "model": model}
    rest = answer["text"][sent:]
    choice = {"index": 0, "finish_reason": "length" if answer["finished"] else None}
    choice.update({"delta": {"role": "assistant", "content": rest}} if chat else {"text": rest})
    yield dict(head, choices=[choice])
    if answer["finished"] and (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        yield dict(head, choices=[], usage=usage)


class NodeHandler(http.server.BaseHTTPRequestHandler):
    """What the nodes above 0 serve: 200, whatever happens to their ranks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        known = self.path in ("/ping", *HEALTH)
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


def model_info(args):
    return {
        "model_path": args.model_path,
        "tokenizer_path": args.tokenizer_path,
        "is_generation": True,
        "weight_version": "default",
        "has_image_understanding": False,
        "architectures": ["DeepseekV3ForCausalLM"],
    }
