#!/usr/bin/env python3
# /// deployctl
# package = "sglang"
# versions = "==0.5.12+standin"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# timeout = "30s"
# ///
"""Verify a tree of one node while many requests run: the worker's own path, without a draft.

Usage: v3.py PACKAGE_DIRECTORY (a staged copy of the package `sglang`). Applying it twice changes nothing.
"""

import os
import sys

SERIES = "dynamic_spec"
MARK = "v3"
BEGIN, END = "# >>> %s %s >>>" % (SERIES, MARK), "# <<< %s %s <<<" % (SERIES, MARK)

FIELD = "    speculative_num_draft_tokens: Optional[int] = None\n"
OPTION = (
    '            "--speculative-num-draft-tokens",\n'
    "            type=int,\n"
    '            help="The number of tokens sampled from the draft model in Speculative Decoding.",\n'
    "            default=ServerArgs.speculative_num_draft_tokens,\n"
    "        )\n"
)
CHECK = "    def check_server_args(self):\n"
IMPORT = "from sglang.srt.mem_cache.common import alloc_token_slots\n"
RUNNER = "        self.target_worker = target_worker\n"
BRANCH = (
    "            self.forward_draft_extend(batch, result.next_token_ids)\n            return result\n        else:\n"
)
LAST_METHOD = "        for tokens in next_token_ids:\n            batch.input_ids = Tensor(tokens)\n"

NEW_FIELD = "    speculative_disable_batch_threshold: Optional[int] = None\n"
NEW_OPTION = """\
        parser.add_argument(
            "--speculative-disable-batch-threshold",
            type=int,
            help="Do without the draft model while more requests than this run together.",
            default=ServerArgs.speculative_disable_batch_threshold,
        )
"""
NEW_CHECK = """\
        if self.speculative_disable_batch_threshold is not None:
            assert self.speculative_algorithm is not None, "the threshold needs --speculative-algorithm"
            assert self.speculative_disable_batch_threshold >= 0, "the threshold must not be negative"
"""
NEW_IMPORT = """\
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.utils import log
"""
NEW_RUNNER = """\
        self.speculation_off = False
        self.root_graph_runner = None
        if server_args.speculative_disable_batch_threshold is not None:
            # A graph has one token width: the pass over roots needs graphs of its own.
            if not server_args.disable_cuda_graph:
                self.root_graph_runner = CudaGraphRunner(target_worker.model_runner, 1)
            log("[dynamic_spec] ready: threshold %d" % server_args.speculative_disable_batch_threshold)
"""
NEW_BRANCH = """\
            if self.without_draft(batch):
                return self.forward_root_only(batch)
"""
NEW_METHODS = '''\
    def without_draft(self, batch):
        """Whether this step does without the draft; says so when that changes."""
        threshold = self.server_args.speculative_disable_batch_threshold
        off = threshold is not None and batch.batch_size() > threshold
        if off != self.speculation_off:
            self.speculation_off = off
            log("[dynamic_spec] speculation %s at %d running requests" % ("OFF" if off else "ON", batch.batch_size()))
        return off

    def forward_root_only(self, batch):
        """One step whose trees are their roots: verify accepts the root and samples one token after it."""
        model_runner = self.target_worker.model_runner
        drafted_graph_runner = model_runner.graph_runner
        roots = Tensor([req.last_token() for req in batch.reqs])
        model_runner.graph_runner = self.root_graph_runner
        try:
            result = self.verify(batch, EagleVerifyInput(roots, spec_steps=0, topk=1, draft_token_num=1))
            # Keeps the draft model's cache warm for the step in which speculation resumes.
            self.forward_draft_extend_after_decode(batch, result.next_token_ids)
            return result
        finally:
            model_runner.graph_runner = drafted_graph_runner
'''


def marked(text, indent):
    """The text between the patch's marks."""
    return "%s%s\n%s%s%s\n" % (indent, BEGIN, text, indent, END)


# File: ((anchor, what goes in after it), ...).
EDITS = {
    "srt/server_args.py": (
        (FIELD, marked(NEW_FIELD, "    ")),
        (OPTION, marked(NEW_OPTION, "        ")),
        (CHECK, marked(NEW_CHECK, "        ")),
    ),
    "srt/speculative/eagle_worker.py": (
        (IMPORT, marked(NEW_IMPORT, "")),
        (RUNNER, marked(NEW_RUNNER, "        ")),
        (BRANCH, marked(NEW_BRANCH, "            ")),
        (LAST_METHOD, "\n" + marked(NEW_METHODS, "    ")),
    ),
}


def patched(path, text, edits):
    """The file's new text; its old one when the patch is already in it.

    Raises:
        SystemExit: The file is not the one that this patch was written for.
    """
    if all(added in text for _, added in edits):
        return text
    if "# >>> %s " % SERIES in text:
        raise SystemExit("%s: another version of %s is in this file; start from the original" % (path, SERIES))
    for anchor, added in edits:
        if text.count(anchor) != 1:
            raise SystemExit(
                "%s: expected exactly once, found %d times:\n%s" % (path, text.count(anchor), anchor.rstrip("\n"))
            )
        text = text.replace(anchor, anchor + added)
    return text


def main(argv):
    if len(argv) != 2:
        raise SystemExit("usage: %s PACKAGE_DIRECTORY" % os.path.basename(argv[0]))
    changes = []
    # Everything is checked before anything is written.
    for name, edits in EDITS.items():
        path = os.path.join(argv[1], *name.split("/"))
        try:
            with open(path, encoding="utf-8", newline="") as source:
                before = source.read()
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit("%s: %s" % (path, error)) from error
        after = patched(path, before, edits)
        if after != before:
            changes.append((name, path, after))
    for name, path, after in changes:
        with open(path, "w", encoding="utf-8", newline="") as target:
            target.write(after)
        print("patched %s" % name)
    if not changes:
        print("nothing to do: %s %s is already applied" % (SERIES, MARK))


if __name__ == "__main__":
    main(sys.argv)
