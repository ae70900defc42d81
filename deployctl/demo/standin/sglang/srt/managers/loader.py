"""The load of one rank: its milestone lines, spread over the time that the load takes."""

import socket
import time

from sglang.srt.utils import bar_progress, log, shards_progress

# Shares of the whole load.
PLAIN = {"dist": 0.08, "weights": 0.55, "kv": 0.04, "graphs": 0.30, "rest": 0.03}
SPECULATIVE = {
    "dist": 0.08, "weights": 0.45, "kv": 0.04, "graphs": 0.22,
    "draft_weights": 0.08, "draft_graphs": 0.07, "draft_extend_graphs": 0.04, "rest": 0.02,
}  # fmt: skip


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


OutOfMemoryError.__module__ = "torch.cuda"


def allocate_weights(size_gib):
    raise OutOfMemoryError(
        "CUDA out of memory. Tried to allocate %.2f GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.19 GiB is "
        "free. Including non-PyTorch memory, this process has 138.61 GiB memory in use." % size_gib
    )


class Loader:
    """Loads one rank."""

    def __init__(self, server_args, rank):
        self.args = server_args
        self.rank = rank
        self.mark = server_args.rank_mark(rank)
        self.first = rank == server_args.local_ranks()[0]
        self.shares = SPECULATIVE if server_args.speculative_algorithm else PLAIN
        self.began = time.monotonic()
        self.peers = []
        self.dies_at = None
        if server_args.standin_mode == "die" and rank == server_args.standin_fail_rank:
            self.dies_at = self.began + (1.0 if server_args.standin_die_at is None else server_args.standin_die_at)

    def say(self, text):
        if self.args.standin_mode != "silent":
            log(text, self.mark)

    def work(self, seconds):
        """Take that long, unless the end comes first."""
        end = time.monotonic() + seconds
        if self.dies_at is not None and self.dies_at <= end:
            time.sleep(max(0.0, self.dies_at - time.monotonic()))
            allocate_weights(2.0)
        time.sleep(seconds)

    def seconds(self, part):
        return self.args.standin_load * self.shares[part]

    def steps(self, show, label, total, part):
        began = time.monotonic()
        for done in range(total + 1):
            if self.first and self.args.standin_mode != "silent":
                show(label(done), done, total, time.monotonic() - began)
            if done < total:
                self.work(self.seconds(part) / total)

    def load(self, init_cuda_graphs):
        """The whole load.

        Args:
            init_cuda_graphs: Called where the engine captures its graphs.
        """
        self.init_distributed()
        self.load_weights("weights", "DeepseekV3ForCausalLM", 137.34, 107.12, shards=8)
        self.work(self.seconds("kv"))
        self.say("Using KV cache dtype: torch.bfloat16")
        self.say("KV Cache is allocated. #tokens: 279520, KV size: 18.29 GB")
        self.say("Memory pool end. avail mem=11.87 GB")
        if not self.args.disable_cuda_graph:
            self.capture("cuda graph", "graphs", 11.70, batches=6)
        init_cuda_graphs()
        if self.args.speculative_algorithm:
            self.load_weights("draft_weights", "LlamaForCausalLMEagle3", 11.16, 1.42, shards=1)
            self.say("KV Cache is allocated. #tokens: 279520, K size: 0.53 GB, V size: 0.53 GB")
            self.say("Memory pool end. avail mem=8.64 GB")
            if not self.args.disable_cuda_graph:
                self.capture("draft cuda graph", "draft_graphs", 8.61, batches=4)
                self.capture("draft extend cuda graph", "draft_extend_graphs", 8.40, batches=4)
        self.work(self.seconds("rest"))
        if self.first:
            self.say(
                "max_total_num_tokens=279520, chunked_prefill_size=%d, max_prefill_tokens=16384, "
                "max_running_requests=%d, context_len=%d, available_gpu_mem=8.21 GB"
                % (
                    self.args.chunked_prefill_size or 8192,
                    self.args.max_running_requests,
                    self.args.context_length or 262144,
                )
            )

    def init_distributed(self):
        self.say("Init torch distributed begin.")
        began = time.monotonic()
        if self.args.nnodes > 1 and self.first:
            self.rendezvous()
        self.work(self.seconds("dist"))
        if self.args.tp_size > 1:
            self.say("sglang is using nccl==2.27.5")
        self.say("Init torch distributed ends. elapsed=%.2f s, mem usage=1.16 GB" % (time.monotonic() - began))

    def rendezvous(self):
        """Wait for the other nodes, without limit and without a word, as the engine does."""
        host, _, port = self.args.dist_init_addr.rpartition(":")
        address = (host.strip("[]"), int(port))
        if self.args.node_rank == 0:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(self.args.nnodes)
                while len(self.peers) < self.args.nnodes - 1:
                    self.peers.append(listener.accept()[0])
            for peer in self.peers:
                peer.sendall(b"go")
            return
        while True:
            try:
                peer = socket.create_connection(address, timeout=5)
                peer.settimeout(None)
                if peer.recv(2) == b"go":
                    self.peers.append(peer)
                    return
            except OSError:
                pass
            time.sleep(0.1)

    def load_weights(self, part, kind, before_gb, size_gb, shards):
        self.say("Load weight begin. avail mem=%.2f GB" % before_gb)
        began = time.monotonic()
        self.steps(shards_progress, lambda _: "Multi-thread loading shards", shards, part)
        self.say(
            "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB."
            % (time.monotonic() - began, kind, before_gb - size_gb, size_gb)
        )

    def capture(self, what, part, before_gb, batches):
        sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48][:batches]
        began = time.monotonic()
        self.say("Capture %s begin. This can take up to several minutes. avail mem=%.2f GB" % (what, before_gb))
        if part == "graphs":
            self.say("Capture cuda graph bs %r" % (sizes,))

        def label(done):
            size = sizes[::-1][min(done, batches - 1)]
            return "Capturing batches (bs=%d avail_mem=%.2f GB)" % (size, before_gb - 0.09 * done)

        self.steps(bar_progress, label, batches, part)
        self.say(
            "Capture %s end. Time elapsed: %.2f s. mem usage=0.54 GB. avail mem=%.2f GB."
            % (what, time.monotonic() - began, before_gb - 0.54)
        )
