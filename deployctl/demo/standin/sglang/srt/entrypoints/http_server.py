"""The parent: loads, starts the ranks, serves HTTP, and dies when a rank does."""

import dataclasses
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import sglang
from sglang.version import __version__
from sglang.srt.utils import log, progress

STARTING, UP, UNHEALTHY = "Starting", "Up", "UnHealthy"


class Engine:
    """The ranks and the requests on their way."""

    def __init__(self, server_args):
        self.args = server_args
        self.status = STARTING
        self.ranks = []
        self.channels = []
        self.waiting = {}
        self.running = 0
        self.number = 0
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.draining = False

    # -- ranks -------------------------------------------------------------------------------------------------------

    def start_ranks(self):
        values = json.dumps(dataclasses.asdict(self.args))
        for rank in range(self.args.tp_size):
            ours, theirs = socket.socketpair()
            title = "sglang::scheduler" if self.args.tp_size == 1 else "sglang::scheduler_TP%d" % rank
            environment = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(sglang.__file__)))
            argv = [title, "-m", "sglang.srt.managers.scheduler", str(rank), str(theirs.fileno()), values]
            self.ranks.append(
                subprocess.Popen(
                    argv,
                    executable=sys.executable,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            theirs.close()
            self.channels.append(ours)

    def tell(self, command):
        for channel in self.channels:
            channel.sendall((json.dumps({"command": command}) + "\n").encode("utf-8"))

    def kill_tree(self):
        for rank in self.ranks:
            if self.args.standin_mode != "orphan" and rank.poll() is None:
                rank.kill()

    def read_answers(self):
        for line in self.channels[0].makefile("rb"):
            answer = json.loads(line.decode("utf-8"))
            slot = self.waiting.pop(answer["id"], None)
            if slot is not None:
                slot["text"] = answer["text"]
                slot["event"].set()

    def generate(self, max_new_tokens, timeout_s):
        """Words from rank 0, or None when none came in time."""
        slot = {"event": threading.Event(), "text": None}
        with self.lock:
            self.number += 1
            number = self.number
            self.running += 1
            running = self.running
            self.waiting[number] = slot
        try:
            message = {"id": number, "max_new_tokens": max_new_tokens, "running": running}
            self.channels[0].sendall((json.dumps(message) + "\n").encode("utf-8"))
            slot["event"].wait(timeout_s)
        except OSError:
            pass
        finally:
            with self.lock:
                self.running -= 1
        return slot["text"]

    # -- the load ----------------------------------------------------------------------------------------------------

    def say(self, text, rank=None):
        if self.args.standin_mode != "silent":
            log(text, rank)

    def bar(self, label, total, seconds):
        for done in range(total + 1):
            if self.args.standin_mode != "silent":
                progress(label, done, total)
            if done < total:
                self.pause(seconds / total)

    def pause(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.args.standin_mode == "die" and time.monotonic() - self.began > self.args.standin_die_at:
                self.args.standin_mode = "dying"
                self.tell("die")
            time.sleep(min(0.02, max(0.0, end - time.monotonic())))

    def load(self):
        part = self.args.standin_load / 10.0
        last = self.args.tp_size
        self.say("server_args=ServerArgs(model_path=%r, port=%d, tp_size=%d)" % (self.args.model_path, self.args.port, last))
        self.start_ranks()
        for rank in range(last):
            mark = rank if last > 1 else None
            self.say("Init torch distributed begin.", mark)
        self.pause(part)
        for rank in range(last):
            mark = rank if last > 1 else None
            self.say("Init torch distributed ends. elapsed=%.2f s, mem usage=0.09 GB" % part, mark)
            self.say("Load weight begin. avail mem=137.34 GB", mark)
        self.bar("Loading safetensors checkpoint shards", 8, part * 4)
        first = 0 if last > 1 else None
        self.say("Load weight end. elapsed=%.2f s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=30.00 GB, mem usage=107.00 GB." % (part * 4), first)
        self.pause(part)
        self.say("KV Cache is allocated. #tokens: 279520, K size: 5.33 GB, V size: 5.33 GB", first)
        self.say("Memory pool end. avail mem=11.87 GB", first)
        self.say("Capture cuda graph begin. This can take up to several minutes. avail mem=11.70 GB", first)
        self.bar("Capturing batches (bs=1 avail_mem=11.24 GB)", 6, part * 2)
        self.say("Capture cuda graph end. Time elapsed: %.2f s. mem usage=0.54 GB. avail mem=11.16 GB." % (part * 2), first)
        if self.args.speculative_algorithm:
            self.say("Capture draft cuda graph begin. This can take up to several minutes. avail mem=10.70 GB", first)
            self.pause(part / 2)
            self.say("Capture draft cuda graph end. Time elapsed: %.2f s. mem usage=0.14 GB." % (part / 2), first)
        self.say(
            "max_total_num_tokens=279520, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=%d, "
            "context_len=131072, available_gpu_mem=11.16 GB" % (self.args.max_running_requests or 2048),
            first,
        )
        self.tell("serve")
        threading.Thread(target=self.read_answers, daemon=True).start()
        self.pause(part)


def quit_on_child(engine):
    """SIGQUIT means that a child failed: end the tree."""

    def handler(signum, frame):
        if engine.status == STARTING:
            log("Received sigquit from a child process. It usually means the child failed.")
        else:
            log("SIGQUIT received. signum=%d, frame=%r. It usually means one child failed." % (signum, frame))
        engine.kill_tree()
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGQUIT, handler)


def watch_ranks(engine):
    """The watchdog of 0.5.12: a rank that died without a word ends the server."""
    if engine.args.standin_mode in ("oldcrash", "dead200", "orphan"):
        return
    while True:
        for number, rank in enumerate(engine.ranks):
            if rank.poll() is not None and not engine.draining:
                time.sleep(0.2)
                log("Subprocess scheduler_%d (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup..." % (number, rank.pid, rank.returncode))
                os.kill(os.getpid(), signal.SIGQUIT)
                return
        time.sleep(0.1)


def drain(engine, server):
    """SIGTERM: finish what runs, then leave."""

    def handler(signum, frame):
        if engine.args.standin_mode == "stubborn":
            return
        engine.draining = True
        log("Draining requests and shutting down...")

        def leave():
            end = time.monotonic() + 5
            while engine.running and time.monotonic() < end:
                time.sleep(0.02)
            engine.kill_tree()
            os._exit(0)

        threading.Thread(target=leave, daemon=True).start()

    signal.signal(signal.SIGTERM, handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, form, *values):
        pass

    def answer(self, status, value, content_type="application/json"):
        body = value if isinstance(value, bytes) else json.dumps(value).encode("utf-8")
        log('INFO:     %s:%d - "%s %s HTTP/1.1" %d' % (self.client_address[0], self.client_address[1], self.command, self.path, status))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def authorized(self):
        key = self.engine.args.api_key
        if key is None or self.headers.get("Authorization") == "Bearer " + key:
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self):
        engine, args = self.engine, self.engine.args
        path = self.path.partition("?")[0]
        if not self.authorized():
            return
        if path in ("/health", "/health_generate"):
            if args.standin_mode == "dead200":
                return self.answer(200, b"", "text/plain")
            if args.standin_mode == "slowhealth":
                time.sleep(args.standin_health_delay)
            if engine.status == STARTING or engine.draining:
                return self.answer(503, b"", "text/plain")
            healthy = engine.generate(1, 20.0) is not None
            self.answer(200 if healthy else 503, b"", "text/plain")
        elif path in ("/model_info", "/get_model_info"):
            self.answer(200, {"model_path": args.model_path, "is_generation": True})
        elif path in ("/server_info", "/get_server_info"):
            self.answer(200, dict(dataclasses.asdict(args), version=__version__))
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": args.model_path, "object": "model"}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        try:
            body = json.loads(self.rfile.read(size).decode("utf-8"))
        except ValueError:
            return self.answer(400, {"error": "not JSON"})
        if not self.authorized():
            return
        mode = self.engine.args.standin_mode
        if mode == "html":
            return self.answer(200, b"<html><body>It works!</body></html>", "text/html")
        sampling = body.get("sampling_params") or {}
        text = self.engine.generate(int(sampling.get("max_new_tokens") or body.get("max_tokens") or 16), 60.0)
        if text is None:
            return self.answer(500, {"error": "the scheduler did not answer"})
        text = {"garbage": "+" * 50, "empty": "", "nulltext": None}.get(mode, text)
        if self.path == "/generate":
            self.answer(200, {"text": text, "meta_info": {"completion_tokens": 16}})
        elif self.path == "/v1/completions":
            self.answer(200, {"choices": [{"text": text, "index": 0}]})
        elif self.path == "/v1/chat/completions":
            self.answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})
        else:
            self.answer(404, {"detail": "Not Found"})


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True


def launch_server(server_args):
    engine = Engine(server_args)
    Handler.engine = engine
    quit_on_child(engine)
    early = None
    if server_args.standin_mode in ("early200", "dead200"):
        early = serve(engine)
        drain(engine, early)
    engine.load()
    threading.Thread(target=watch_ranks, args=(engine,), daemon=True).start()
    server = early or serve(engine)
    drain(engine, server)
    log("INFO:     Started server process [%d]" % os.getpid())
    log("INFO:     Waiting for application startup.")
    log("INFO:     Application startup complete.")
    log("INFO:     Uvicorn running on http://%s:%d (Press CTRL+C to quit)" % (server_args.host, server_args.port))
    if engine.generate(8, 30.0) is None:
        log("Initialization failed. warmup error: no answer")
        engine.kill_tree()
        os._exit(1)
    engine.status = UP
    log("The server is fired up and ready to roll!")
    if server_args.standin_mode == "exit0":
        time.sleep(0.5)
        engine.kill_tree()
        os._exit(0)
    if server_args.standin_mode == "sigsegv":
        time.sleep(0.5)
        engine.kill_tree()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        signal.pause()


def serve(engine):
    try:
        server = Server((engine.args.host, engine.args.port), Handler)
    except OSError as error:
        log("ERROR:    [Errno %d] error while attempting to bind on address ('%s', %d): address already in use" % (error.errno, engine.args.host, engine.args.port))
        engine.kill_tree()
        os._exit(1)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
