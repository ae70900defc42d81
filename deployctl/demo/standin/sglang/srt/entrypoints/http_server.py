"""The HTTP server, and the life of the parent process."""

import contextlib
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

from sglang.srt.entrypoints.engine import UP, Engine
from sglang.srt.entrypoints.routes import MODEL_INFO, Handler, NodeHandler
from sglang.srt.utils import access_log, log, no_core_file

WARMUP_PROMPT = "The capital city of France is"
UVICORN_STARTUP_FAILURE = 3


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
    """The mode early200: a port that answers, and a model list, long before the model is there.

    Returns:
        What to call after the load: whether the port was free.
    """
    bound = []
    delay_s = min(1.0, engine.server_args.standin_load / 4)
    timer = threading.Timer(delay_s, lambda: bound.append(bind(engine.server_args, Handler) is not None))
    timer.daemon = True
    timer.start()

    def has_port():
        timer.join()
        return bound[0]

    return has_port


def die_by_signal_after(seconds):
    """The mode sigsegv."""

    def die():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)

    previous = signal.signal(signal.SIGALRM, lambda signum, frame: die())
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    return previous


def warm_up(engine):
    """The first request through the server's own port, whoever has it, as the engine does it; then it is ready.

    Without an answer it ends the server.
    """
    args = engine.server_args
    if not args.skip_server_warmup:
        error = first_request(args)
        if error is not None:
            log("Initialization failed. warmup error: %s" % error)
            engine.kill_process_tree(include_parent=True)
    engine.server_status = UP
    log("The server is fired up and ready to roll!")


def first_request(args):
    """Wait for the port for two minutes, then generate.

    Returns:
        None, or what went wrong.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = "Bearer " + args.api_key
    body = json.dumps({"text": WARMUP_PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})

    def ask(method, path, sent, timeout_s):
        try:
            with contextlib.closing(http.client.HTTPConnection(host, args.port, timeout=timeout_s)) as connection:
                connection.request(method, path, sent, headers)
                response = connection.getresponse()
                text = response.read()
        except (OSError, http.client.HTTPException) as error:
            return "%s: %r" % (path, error)
        return None if response.status == 200 else "%s answered %d: %r" % (path, response.status, text[:200])

    error = ask("GET", MODEL_INFO[0], None, 5)
    for _ in range(120):
        if error is None:
            return ask("POST", "/generate", body, 600)
        time.sleep(1)
        error = ask("GET", MODEL_INFO[0], None, 5)
    return error


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
    has_port = serve_early(engine) if args.standin_mode == "early200" else lambda: bind(args, Handler) is not None
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
    if not has_port():
        # The engine's warm-up runs on beside this: another server on the port makes it say that it is ready, a holder
        # of the port that does not answer keeps it there for minutes.
        access_log("Waiting for application shutdown.")
        warm_up(engine)
        access_log("Application shutdown complete.")
        return UVICORN_STARTUP_FAILURE
    host = "[%s]" % args.host if ":" in args.host else args.host
    access_log("Uvicorn running on http://%s:%d (Press CTRL+C to quit)" % (host, args.port))
    try:
        serve(engine)
    except KeyboardInterrupt:
        access_log("Shutting down")
        access_log("Waiting for application shutdown.")
        access_log("Application shutdown complete.")
        access_log("Finished server process [%d]" % os.getpid())
    return 0


def serve(engine):
    """From the warm-up on: ends by a signal, or as the mode has it."""
    args = engine.server_args
    warm_up(engine)
    if args.standin_mode == "exit0":
        time.sleep(0.3)
        return
    if args.standin_mode == "sigsegv":
        die_by_signal_after(0.3)
    if args.standin_mode in ("oldcrash", "dead200") and args.standin_die_at is not None:
        time.sleep(args.standin_die_at)
        engine.send({"die": True})
    wait_for_signals()


def wait_for_signals():
    while True:
        signal.pause()
