# /// deployctl
# package = "sglang"
# versions = ">=0.5.12,<0.5.13"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# ///
"""Above the threshold, verify a tree that is only its root: one new token a request, from the target."""

import pathlib
import sys

package = pathlib.Path(sys.argv[1])


def edit(path, *changes):
    """Replace each anchor, which must occur exactly once; a file that holds the changes already stays as it is."""
    target = package / path
    text = target.read_text()
    if all(new in text for _, new in changes):
        print(path + ": already patched")
        return
    for anchor, new in changes:
        if text.count(anchor) != 1:
            sys.exit("%s: the anchor %r occurs %d times, not once" % (path, anchor.strip(), text.count(anchor)))
        text = text.replace(anchor, new)
    target.write_text(text)
    print(path + ": patched")


FIELD = "    speculative_num_draft_tokens: Optional[int] = None\n"
OPTION = "            default=ServerArgs.speculative_num_draft_tokens,\n        )\n"
edit(
    "srt/server_args.py",
    (FIELD, FIELD + "    speculative_disable_batch_threshold: Optional[int] = None\n"),
    (
        OPTION,
        OPTION
        + '        parser.add_argument("--speculative-disable-batch-threshold", type=int, default=None)\n',
    ),
)

DRAFT = "            spec_info = self.draft(batch)\n"
INIT = "        self.graph_runner = CudaGraphRunner(self.speculative_num_draft_tokens)\n"
edit(
    "srt/speculative/eagle_worker.py",
    (INIT, INIT + "        self.root_graph_runner = CudaGraphRunner(1)\n"),
    (
        DRAFT,
        "            threshold = self.server_args.speculative_disable_batch_threshold\n"
        "            if threshold is not None and len(batch.reqs) > threshold:\n"
        "                return self.verify_root_only(batch)\n" + DRAFT,
    ),
    (
        "    def forward_draft_extend_after_decode(self, batch):\n",
        "    def verify_root_only(self, batch):\n"
        "        # A graph of its own: the other one is captured for draft_token_num tokens a request.\n"
        "        batch.input_ids = Tensor([1] * len(batch.reqs))\n"
        "        words = self.root_graph_runner.replay(batch)\n"
        "        self.forward_draft_extend_after_decode(batch)\n"
        "        return [[word] for word in words], [1] * len(batch.reqs)\n\n"
        "    def forward_draft_extend_after_decode(self, batch):\n",
    ),
)
