# /// deployctl
# package = "sglang"
# versions = ">=0.5.12,<0.5.13"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# ///
"""Above the threshold, allocate the slots by hand before the target runs."""

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
edit(
    "srt/speculative/eagle_worker.py",
    (
        DRAFT,
        "            threshold = self.server_args.speculative_disable_batch_threshold\n"
        "            if threshold is not None and len(batch.reqs) > threshold:\n"
        "                out_cache_loc, _ = alloc_token_slots(self.tree_cache, len(batch.reqs))\n"
        "                batch.out_cache_loc = out_cache_loc\n"
        "                batch.spec_info = None\n"
        "                self.run_target(batch)\n"
        "                return [[req.next_word()] for req in batch.reqs], [1] * len(batch.reqs)\n" + DRAFT,
    ),
)
