"""One rank: takes requests from the parent over a socket, runs them as one batch, gives words back."""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback

from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker import EAGLEWorker
from sglang.srt.utils import Tensor, die_with_parent, log

WORDS = (
    "Paris is the capital of France and its largest city on the river Seine with bridges museums and markets "
    "where people meet talk read and walk along quiet streets under old trees in every season"
).split()


class Req:
    def __init__(self, number, max_new_tokens):
        self.number = number
        self.left = max_new_tokens
        self.at = number
        self.words = []

    def next_word(self):
        self.at += 1
        return WORDS[self.at % len(WORDS)]


class ScheduleBatch:
    def __init__(self):
        self.reqs = []
        self.forward_mode = "decode"
        self.input_ids = Tensor([1, 2])
        self.spec_info = None
        self.spec_algorithm = None


class Scheduler:
    def __init__(self, server_args, rank, channel):
        self.server_args = server_args
        self.rank = rank
        self.channel = channel
        self.incoming = queue.Queue()
        self.batch = ScheduleBatch()
        self.worker = EAGLEWorker(server_args) if server_args.speculative_algorithm else None
        self.steps = 0
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.channel.makefile("rb"):
            self.incoming.put(json.loads(line.decode("utf-8")))
        if self.server_args.standin_mode != "orphan":
            self.incoming.put(None)

    def event_loop(self):
        while True:
            self.admit()
            if self.batch.reqs:
                self.step()
                time.sleep(self.server_args.standin_step_ms / 1000.0)

    def admit(self):
        while True:
            try:
                message = self.incoming.get(block=not self.batch.reqs)
            except queue.Empty:
                return
            if message is None:
                os._exit(0)
            req = Req(message["id"], message["max_new_tokens"])
            if self.server_args.standin_mode == "burst-hang" and message["running"] > self.server_args.standin_burst_limit:
                continue
            self.batch.reqs.append(req)
            log("Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, #running-req: %d" % len(self.batch.reqs), self.rank)
            if self.worker is not None:
                extend = ScheduleBatch()
                extend.reqs, extend.forward_mode = [req], "extend"
                self.worker.forward_batch_generation(extend)

    def step(self):
        mode = self.server_args.standin_mode
        if mode in ("burst", "oldcrash", "dead200") and len(self.batch.reqs) > self.server_args.standin_burst_limit:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.worker is not None:
            words, accepted = self.worker.forward_batch_generation(self.batch)
        else:
            words, accepted = [[req.next_word()] for req in self.batch.reqs], [1] * len(self.batch.reqs)
        self.steps += 1
        for req, new in zip(self.batch.reqs, words):
            new = new if isinstance(new, list) else [new]
            req.words.extend(new)
            req.left -= len(new)
        if self.steps % 40 == 1:
            average = sum(accepted) / float(len(accepted))
            log(
                "Decode batch, #running-req: %d, #token: %d, token usage: 0.01, accept len: %.2f, cuda graph: True, "
                "gen throughput (token/s): %.2f, #queue-req: 0"
                % (len(self.batch.reqs), 9 * len(self.batch.reqs), average, 200.0 * sum(accepted)),
                self.rank,
            )
        for req in [req for req in self.batch.reqs if req.left <= 0]:
            self.answer(req)
        self.batch.reqs = [req for req in self.batch.reqs if req.left > 0]

    def answer(self, req):
        message = json.dumps({"id": req.number, "text": " " + " ".join(req.words)}) + "\n"
        self.channel.sendall(message.encode("utf-8"))


def out_of_memory():
    allocate_weights()


def allocate_weights():
    raise OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.19 GiB is free."
    )


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


OutOfMemoryError.__module__ = "torch"


def main():
    rank, handle, values = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    server_args = ServerArgs(**values)
    channel = socket.socket(fileno=handle)
    serve(server_args, rank, channel)


def serve(server_args, rank, channel):
    if server_args.standin_mode != "orphan":
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stream = channel.makefile("rb", buffering=0)
        while True:
            line = stream.readline()
            if not line:
                if server_args.standin_mode == "orphan":
                    time.sleep(3600)
                os._exit(0)
            command = json.loads(line.decode("utf-8")).get("command")
            if command == "die":
                out_of_memory()
            if command == "serve":
                break
        Scheduler(server_args, rank, channel).event_loop()
    except Exception:
        log("Scheduler hit an exception: %s" % traceback.format_exc(), rank)
        if server_args.standin_mode not in ("oldcrash", "dead200"):
            os.kill(os.getppid(), signal.SIGQUIT)
        os._exit(1)


if __name__ == "__main__":
    main()
