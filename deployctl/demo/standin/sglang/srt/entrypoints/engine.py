"""The parent's side of the ranks: starts them, sends them requests, and ends with them."""

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time

import sglang
from sglang.srt.utils import log

STARTING, UP, UNHEALTHY = "Starting", "Up", "UnHealthy"


class Disconnected(Exception):
    """The client went away before its answer."""


class Engine:
    """The ranks of this node and the requests on their way."""

    def __init__(self, server_args):
        self.server_args = server_args
        self.server_status = STARTING
        self.gracefully_exit = False
        self.exiting = False
        self.ranks = []
        self.channels = []
        self.rid_to_state = {}
        self.lock = threading.Lock()
        self.number = 0
        self.scheduler_info = {}
        self.decoded_tokens = self.forward_ct = 0

    def say(self, text):
        """A line of the load."""
        if self.server_args.standin_mode != "silent":
            log(text)

    # -- Ranks ---------------------------------------------------------------------------------------------------------

    def launch_subprocesses(self):
        """Start the ranks of this node and wait until all have loaded.

        Raises:
            EOFError: A rank died without a word.
        """
        args = self.server_args
        self.say("server_args=%r" % (args,))
        names = [field for field in vars(args)]
        values = json.dumps({name: getattr(args, name) for name in names})
        for rank in args.local_ranks():
            title = "sglang::scheduler" + args.rank_mark(rank).replace(" ", "_")
            self.ranks.append(self.start_rank(title, rank, values))
        streams = [channel.makefile("rb") for channel in self.channels]
        for number, stream in enumerate(streams):
            line = stream.readline()
            if not line:
                status = self.ranks[number].wait()
                time.sleep(0.2)  # a rank that failed with an exception has sent SIGQUIT, which comes first
                log("Rank %d scheduler is dead. Please check if there are relevant logs." % args.local_ranks()[number])
                log("Exit code: %d" % status)
                raise EOFError
            self.scheduler_info = json.loads(line.decode("utf-8"))
        for number, rank in enumerate(self.ranks):
            threading.Thread(target=self.watch_rank, args=(number, rank), daemon=True).start()
        threading.Thread(target=self.handle_loop, args=(streams[0],), daemon=True).start()

    def start_rank(self, title, rank, values):
        ours, theirs = socket.socketpair()
        # The title stands as argv[0], so the interpreter cannot find its home through it.
        packages = sysconfig.get_paths()["purelib"]
        paths = [os.path.dirname(os.path.dirname(os.path.abspath(sglang.__file__))), packages]
        environment = dict(
            os.environ,
            PYTHONHOME=os.pathsep.join((sys.base_prefix, sys.base_exec_prefix)),
            PYTHONPATH=os.pathsep.join(paths),
        )
        with theirs:
            process = subprocess.Popen(
                [title, "-m", "sglang.srt.managers.scheduler", "--rank", str(rank), "--channel", str(theirs.fileno())],
                executable=sys.executable,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.sendall((values + "\n").encode("utf-8"))
        self.channels.append(ours)
        return process

    def watch_rank(self, number, rank):
        """The watchdog of 0.5.12; 0.5.9 had none, and lived on without its schedulers."""
        status = rank.wait()
        if self.server_args.standin_mode in ("oldcrash", "dead200"):
            return
        time.sleep(0.3)  # the SIGQUIT of a rank that failed with an exception comes first
        if not self.exiting:
            log(
                "Subprocess scheduler_%d (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup..."
                % (number, rank.pid, status)
            )
            os.kill(os.getpid(), signal.SIGQUIT)

    def kill_process_tree(self, include_parent):
        """SIGKILL, as the engine does it: no grace, no waiting, itself last."""
        self.exiting = True
        for rank in self.ranks:
            if self.server_args.standin_mode != "orphan" and rank.poll() is None:
                rank.kill()
        if include_parent:
            os.kill(os.getpid(), signal.SIGKILL)

    # -- Requests ------------------------------------------------------------------------------------------------------

    def handle_loop(self, stream):
        """Give the answers of rank 0 to those who wait for them."""
        for line in stream:
            answer = json.loads(line.decode("utf-8"))
            if answer["finished"]:
                # Their quotient is the mean accept length, counted as the engine does from flush to flush.
                self.decoded_tokens += len(answer["output_ids"]) - 1
                self.forward_ct += answer["forward_ct"]
            arrived = self.rid_to_state.get(answer["rid"])
            if arrived is not None:
                arrived.put(answer)

    def send(self, message):
        with self.lock:
            try:
                self.channels[0].sendall((json.dumps(message) + "\n").encode("utf-8"))
            except OSError:
                pass  # the rank is dead: the request waits, as it does in the engine

    def generate(self, prompt, max_new_tokens, kind="generate", timeout_s=None, connection=None):
        """Run one request to its end; see `stream`.

        Returns:
            The scheduler's answer, or None when none came in time.
        """
        answer = None
        for answer in self.stream(prompt, max_new_tokens, kind, timeout_s, connection, partial=False):
            pass
        return answer

    def stream(self, prompt, max_new_tokens, kind="generate", timeout_s=None, connection=None, partial=True):
        """Run one request, and give its answer as it grows.

        Args:
            prompt: Text.
            max_new_tokens: How many tokens to generate.
            kind: generate, warmup or health.
            timeout_s: Give up after that long; None waits for ever.
            connection: The client's socket: when it closes, the request is aborted.
            partial: Whether to give what is not finished yet.

        Raises:
            Disconnected: The client went away.
        """
        arrived = queue.Queue()
        with self.lock:
            self.number += 1
            rid = self.number
        self.rid_to_state[rid] = arrived
        finished = False
        try:
            self.send(
                {"rid": rid, "prompt": prompt, "max_new_tokens": max_new_tokens, "kind": kind, "stream": partial}
            )
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not finished:
                patience_s = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
                try:
                    answer = arrived.get(timeout=max(0.001, patience_s))
                except queue.Empty:
                    if patience_s <= 0:
                        return
                    if connection is not None and closed(connection):
                        raise Disconnected
                    continue
                finished = answer["finished"]
                yield answer
        finally:
            if not finished:
                self.send({"abort": rid})
            del self.rid_to_state[rid]

    def drain(self):
        """After SIGTERM: wait for the requests on their way, then end everything."""
        while True:
            remaining = list(self.rid_to_state)
            if self.server_status == UNHEALTHY:
                log("Signal SIGTERM received while health check failed. Force exiting.")
                break
            log(
                "Gracefully exiting... Remaining number of requests %d. Remaining requests remaining_rids=%r."
                % (len(remaining), remaining)
            )
            if not remaining:
                break
            for _ in range(50):
                if self.rid_to_state:
                    time.sleep(0.1)
        self.kill_process_tree(include_parent=True)


def closed(connection):
    """Whether the peer of a socket has closed it."""
    readable = select.poll()
    readable.register(connection, select.POLLIN)
    try:
        return bool(readable.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
