"""One rank: loads, then takes requests from the parent, runs them as one batch, and sends tokens back."""

import argparse
import json
import os
import queue
import signal
import socket
import threading
import time
import traceback

from sglang.srt.managers.loader import Loader
from sglang.srt.managers.schedule_batch import GenerationBatchResult, Req, ScheduleBatch
from sglang.srt.mem_cache.common import TreeCache
from sglang.srt.model_executor.model_runner import TpModelWorker
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker import EAGLEWorker
from sglang.srt.tensors import Tensor
from sglang.srt.utils import kill_itself_when_parent_died, log, no_core_file, show_title

MAX_TOTAL_NUM_TOKENS = 279520
# A prefill takes a while; what arrives meanwhile joins before the next decode step.
PREFILL_S = 0.02


class Scheduler:
    """The batch of one rank, step by step."""

    def __init__(self, server_args, rank, channel):
        self.server_args = server_args
        self.rank = rank
        self.mark = server_args.rank_mark(rank)
        self.channel = channel
        self.tree_cache = TreeCache(MAX_TOTAL_NUM_TOKENS)
        self.tp_worker = TpModelWorker(server_args)
        self.loader = Loader(server_args, rank)
        self.loader.load(self.tp_worker.model_runner.init_cuda_graphs)
        self.model_worker = self.tp_worker
        if server_args.speculative_algorithm:
            self.model_worker = EAGLEWorker(server_args, self.tp_worker)
        self.running_batch = ScheduleBatch([], self.tree_cache)
        self.waiting_queue = []
        self.arrivals = queue.Queue()
        self.forward_ct_decode = 0
        self.num_generated_tokens = 0
        self.last_log_at = self.last_prefill_at = time.monotonic()

    def send(self, message):
        try:
            self.channel.sendall((json.dumps(message) + "\n").encode("utf-8"))
        except OSError:
            self.parent_is_gone()

    def parent_is_gone(self):
        if self.server_args.standin_mode == "orphan":
            threading.Event().wait()
        os._exit(0)

    def receive(self, stream):
        for line in stream:
            self.arrivals.put(json.loads(line.decode("utf-8")))
        self.arrivals.put(None)

    def event_loop_normal(self, stream):
        """Prefill goes first, then one decode step, as long as the process lives."""
        threading.Thread(target=self.receive, args=(stream,), daemon=True).start()
        self.send({"status": "ready", "max_total_num_tokens": MAX_TOTAL_NUM_TOKENS})
        while True:
            self.recv_requests()
            batch = self.get_new_batch_prefill()
            if batch is not None:
                self.run_prefill(batch)
            elif self.running_batch.reqs:
                self.run_decode()

    def recv_requests(self):
        idle = not self.running_batch.reqs and not self.waiting_queue
        while True:
            try:
                message = self.arrivals.get(block=idle)
            except queue.Empty:
                return
            idle = False
            self.process_input_request(message)

    def process_input_request(self, message):
        mode = self.server_args.standin_mode
        if message is None:
            self.parent_is_gone()
        if "abort" in message:
            self.waiting_queue = [req for req in self.waiting_queue if req.rid != message["abort"]]
            self.running_batch.reqs = [req for req in self.running_batch.reqs if req.rid != message["abort"]]
            return
        if "die" in message or (mode in ("oldcrash", "dead200") and message["kind"] == "generate"):
            self.fail()
        over = len(self.running_batch.reqs) + len(self.waiting_queue) >= self.server_args.standin_burst_limit
        if mode == "burst-hang" and over:
            return
        self.waiting_queue.append(
            Req(message["rid"], message["prompt"], message["max_new_tokens"], message["kind"], message.get("stream"))
        )

    def fail(self):
        """The deaths that the server does not notice: an exception in oldcrash, an abort below Python in dead200."""
        if self.server_args.standin_mode == "oldcrash":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\n")
        os.write(2, b"  what():  [PG ID 2 PG GUID 3 Rank 0] Process group watchdog thread terminated with exception\n")
        os.kill(os.getpid(), signal.SIGABRT)

    def get_new_batch_prefill(self):
        room = self.server_args.max_running_requests - len(self.running_batch.reqs)
        if not self.waiting_queue or room <= 0:
            return None
        chosen, self.waiting_queue = self.waiting_queue[:room], self.waiting_queue[room:]
        return ScheduleBatch(chosen, self.tree_cache, "extend")

    def run_prefill(self, batch):
        now = time.monotonic()
        new_tokens = sum(req.prompt_tokens for req in batch.reqs)
        log(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: 0, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d, #pending-token: 0, cuda graph: False, input throughput (token/s): %.2f"
            % (
                len(batch.reqs),
                new_tokens,
                self.token_usage(),
                len(self.running_batch.reqs),
                len(self.waiting_queue),
                new_tokens / max(now - self.last_prefill_at, 1e-9),
            ),
            self.mark,
        )
        self.last_prefill_at = now
        time.sleep(PREFILL_S)
        self.process_batch_result(batch, self.run_batch(batch))
        self.running_batch.merge_batch(batch)

    def run_decode(self):
        self.running_batch.prepare_for_decode()
        time.sleep(self.server_args.standin_step_ms / 1000.0)
        # Asked before the pass, which may swap what it runs on.
        by_graph = self.tp_worker.model_runner.can_run_cuda_graph(self.running_batch)
        result = self.run_batch(self.running_batch)
        self.forward_ct_decode += 1
        self.num_generated_tokens += sum(len(tokens) for tokens in result.next_token_ids)
        if self.forward_ct_decode % self.server_args.decode_log_interval == 0:
            self.log_decode_stats(result, by_graph)
        self.process_batch_result(self.running_batch, result)

    def run_batch(self, batch):
        """One forward pass."""
        limit = self.server_args.standin_burst_limit
        if self.server_args.standin_mode == "burst" and batch.forward_mode == "decode" and batch.batch_size() > limit:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\n"
                "CUDA kernel errors might be asynchronously reported at some other API call."
            )
        if self.model_worker is not self.tp_worker:
            return self.model_worker.forward_batch_generation(batch)
        if batch.forward_mode == "decode":
            batch.input_ids = Tensor([req.last_token() for req in batch.reqs])
        rows = self.tp_worker.forward_batch_generation(batch)
        return GenerationBatchResult([row[:1] for row in rows])

    def process_batch_result(self, batch, result):
        for req, tokens in zip(batch.reqs, result.next_token_ids):
            req.output_ids.extend(tokens)
            req.forward_ct += batch.forward_mode == "decode"
            if req.finished():
                del req.output_ids[req.max_new_tokens :]
            if req.finished() or req.stream:
                self.send(
                    {
                        "rid": req.rid,
                        "text": self.tp_worker.model_runner.decode(req.output_ids),
                        "output_ids": req.output_ids,
                        "prompt_tokens": req.prompt_tokens,
                        "forward_ct": req.forward_ct,
                        "finished": req.finished(),
                    }
                )
        batch.filter_batch()

    def token_usage(self):
        tokens = sum(req.prompt_tokens + len(req.output_ids) for req in self.running_batch.reqs)
        return tokens / float(MAX_TOTAL_NUM_TOKENS)

    def log_decode_stats(self, result, by_graph):
        now = time.monotonic()
        text = "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, " % (
            len(self.running_batch.reqs),
            sum(req.prompt_tokens + len(req.output_ids) for req in self.running_batch.reqs),
            self.token_usage(),
        )
        if self.model_worker is not self.tp_worker:
            accept_length = sum(len(tokens) for tokens in result.next_token_ids) / float(len(result.next_token_ids))
            text += "accept len: %.2f, accept rate: %.2f, " % (
                accept_length,
                accept_length / (self.server_args.speculative_num_steps + 1),
            )
        log(
            text + "cuda graph: %s, gen throughput (token/s): %.2f, #queue-req: %d"
            % (by_graph, self.num_generated_tokens / max(now - self.last_log_at, 1e-9), len(self.waiting_queue)),
            self.mark,
        )
        self.num_generated_tokens, self.last_log_at = 0, now


def run_scheduler_process(server_args, rank, channel, stream):
    """Load and run until the parent goes; an exception ends the server."""
    parent = os.getppid()
    if server_args.standin_mode != "orphan":
        kill_itself_when_parent_died(parent)
    try:
        scheduler = Scheduler(server_args, rank, channel)
        scheduler.event_loop_normal(stream)
    except Exception:
        log("Scheduler hit an exception: %s" % traceback.format_exc(), server_args.rank_mark(rank))
        if server_args.standin_mode != "oldcrash" and os.getppid() == parent:
            os.kill(parent, signal.SIGQUIT)
        os._exit(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    # Ctrl-C in a terminal is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    no_core_file()
    show_title()
    channel = socket.socket(fileno=options.channel)
    stream = channel.makefile("rb")
    server_args = ServerArgs(**json.loads(stream.readline().decode("utf-8")))
    run_scheduler_process(server_args, options.rank, channel, stream)


if __name__ == "__main__":
    main()
