"""The HTTP server, and the life of the parent process."""

import contextlib
import dataclasses
import http
import http.client
import http.server
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time

from sglang.srt.entrypoints.engine import STARTING, UNHEALTHY, UP, Disconnected, Engine
from sglang.srt.utils import access_log, log, no_core_file
from sglang.version import __version__

WARMUP_PROMPT = "The capital city of France is"


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
            % (self.client_address[0], self.client_address[1], self.command, self.path, status, http.HTTPStatus(status).phrase)
        )
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
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
        if path in ("/health", "/health_generate"):
            self.answer(self.health())
        elif path in ("/model_info", "/get_model_info"):
            self.answer(200, model_info(args))
        elif path in ("/server_info", "/get_server_info"):
            info = dict(dataclasses.asdict(args), version=__version__, internal_states=[{}])
            self.answer(200, dict(info, **self.engine.scheduler_info))
        elif path == "/v1/models":
            model = {"id": args.served_model_name, "object": "model", "owned_by": "sglang", "root": args.served_model_name}
            self.answer(200, {"object": "list", "data": [model]})
        else:
            self.answer(404, {"detail": "Not Found"})

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

    # -- POST ----------------------------------------------------------------------------------------------------------

    def do_POST(self):
        if self.refused():
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        routes = {
            "/generate": self.generate,
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
        }
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            return self.answer(404, {"detail": "Not Found"})
        try:
            value = json.loads(body.decode("utf-8"))
            if not isinstance(value, dict):
                raise BadRequest("the body must be a JSON object")
            if value.get("stream"):
                raise BadRequest("the stand-in engine does not stream")
            answer = route(value)
        except (ValueError, BadRequest) as error:
            return self.answer(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        except Disconnected:
            self.close_connection = True
            return
        if self.engine.server_args.standin_mode == "html" and self.engine.server_status != STARTING:
            return self.answer(200, b"<!DOCTYPE html><html><body><h1>It works!</h1></body></html>", "text/html")
        self.answer(200, answer)

    def run(self, prompts, max_new_tokens):
        """Run prompts together; the answers in their order."""
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise BadRequest("max_new_tokens must be at least 1, got %r" % (max_new_tokens,))
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
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise BadRequest("messages must be a list of objects")
        prompt = "\n".join(str(message.get("content")) for message in messages)
        answers = self.run([prompt], body.get("max_completion_tokens") or body.get("max_tokens") or 128)
        message = {"role": "assistant", "content": self.shown(answers[0]), "tool_calls": None}
        return self.completion("chat.completion", [{"index": 0, "message": message, "finish_reason": "length"}], answers)

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


class NodeHandler(http.server.BaseHTTPRequestHandler):
    """What the nodes above 0 serve: 200, whatever happens to their ranks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        known = self.path in ("/ping", "/health", "/health_generate")
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A thread a connection."""

    daemon_threads = True
    request_queue_size = 2048
    allow_reuse_address = True

    def server_bind(self):
        # HTTPServer asks the name service for the host's name here, which may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def model_info(args):
    return {
        "model_path": args.model_path,
        "tokenizer_path": args.tokenizer_path,
        "is_generation": True,
        "weight_version": "default",
        "has_image_understanding": False,
        "architectures": ["DeepseekV3ForCausalLM"],
    }


def bind(args, handler):
    """A server on the port, or None, said in the log, when the port is taken."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    kind = type("Server", (Server,), {"address_family": family})
    try:
        server = kind((args.host, args.port), handler)
    except OSError as error:
        log(
            "ERROR:    [Errno %d] error while attempting to bind on address ('%s', %d): %s"
            % (error.errno or 0, args.host, args.port, (error.strerror or str(error)).lower())
        )
        return None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 3600}, daemon=True).start()
    return server


def install_launch_signals(engine):
    """While loading: a failed rank ends everything, SIGTERM has its default effect."""

    def on_quit(signum, frame):
        log("Received sigquit from a child process. It usually means the child failed.")
        engine.kill_process_tree(include_parent=True)

    signal.signal(signal.SIGQUIT, on_quit)
    if engine.server_args.standin_mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def install_running_signals(engine):
    """While serving: a failed rank ends everything, SIGTERM drains first."""

    def on_quit(signum, frame):
        # The engine's event loop calls its handlers without arguments.
        log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        engine.kill_process_tree(include_parent=True)

    def on_terminate(signum, frame):
        log("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        if not engine.gracefully_exit:
            engine.gracefully_exit = True
            threading.Thread(target=engine.drain, daemon=True).start()

    signal.signal(signal.SIGQUIT, on_quit)
    if engine.server_args.standin_mode != "stubborn":
        signal.signal(signal.SIGTERM, on_terminate)


def serve_early(engine):
    """The mode early200: a port that answers, and a model list, long before the model is there."""
    delay_s = min(1.0, engine.server_args.standin_load / 4)
    timer = threading.Timer(delay_s, bind, (engine.server_args, Handler))
    timer.daemon = True
    timer.start()
    return timer


def die_by_signal_after(seconds):
    """The mode sigsegv."""

    def die():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)

    previous = signal.signal(signal.SIGALRM, lambda signum, frame: die())
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    return previous


def warm_up(engine):
    """The first request through the server's own port, as the engine does it.

    Returns:
        Whether it was answered.
    """
    args = engine.server_args
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = "Bearer " + args.api_key
    body = json.dumps({"text": WARMUP_PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    try:
        for method, path, sent in (("GET", "/model_info", None), ("POST", "/generate", body)):
            with contextlib.closing(http.client.HTTPConnection(host, args.port, timeout=600)) as connection:
                connection.request(method, path, sent, headers)
                response = connection.getresponse()
                text = response.read()
            if response.status != 200:
                raise OSError("%s answered %d: %r" % (path, response.status, text[:200]))
    except (OSError, http.client.HTTPException) as error:
        log("Initialization failed. warmup error: %s" % error)
        return False
    return True


def serve_node(engine):
    """The life of a node above 0, after its load."""
    args = engine.server_args
    log("Starting dummy health check server at %s:%d" % (args.host, args.port))
    return bind(args, NodeHandler)


def launch_server(server_args):
    """Load, serve, and end; does not return."""
    no_core_file()
    engine = Engine(server_args)
    Handler.engine = engine
    install_launch_signals(engine)
    status = 1
    try:
        status = run_server(engine)
    finally:
        engine.kill_process_tree(include_parent=False)
    sys.exit(status)


def run_server(engine):
    args = engine.server_args
    early = serve_early(engine) if args.standin_mode == "early200" else None
    if args.standin_mode == "sigsegv" and args.standin_die_at is not None:
        die_by_signal_after(args.standin_die_at)
    engine.launch_subprocesses()
    install_running_signals(engine)
    if args.node_rank > 0:
        if serve_node(engine) is None:
            return 1
        wait_for_signals()
    for line in ("Started server process [%d]" % os.getpid(), "Waiting for application startup."):
        access_log(line)
    access_log("Application startup complete.")
    if early is not None:
        early.join()
    elif bind(args, Handler) is None:
        access_log("Waiting for application shutdown.")
        access_log("Application shutdown complete.")
        return 1
    access_log("Uvicorn running on http://%s:%d (Press CTRL+C to quit)" % (args.host, args.port))
    if not args.skip_server_warmup and not warm_up(engine):
        return 1
    engine.server_status = UP
    log("The server is fired up and ready to roll!")
    if args.standin_mode == "exit0":
        time.sleep(0.3)
        return 0
    if args.standin_mode == "sigsegv":
        die_by_signal_after(0.3)
    if args.standin_mode in ("oldcrash", "dead200") and args.standin_die_at is not None:
        time.sleep(args.standin_die_at)
        engine.send({"die": True})
    wait_for_signals()
    return 0


def wait_for_signals():
    while True:
        signal.pause()
