#!/usr/bin/env python3
# /// deployctl
# package = "sglang"
# versions = "==0.5.12+standin"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# timeout = "30s"
# ///
"""Skip the draft while many requests run: clear what speculation left, allocate by hand, decode plainly.

Usage: v2.py PACKAGE_DIRECTORY (a staged copy of the package `sglang`). Applying it twice changes nothing.
"""

import os
import sys

SERIES = "dynamic_spec"
MARK = "v2"
BEGIN, END = "# >>> %s %s >>>" % (SERIES, MARK), "# <<< %s %s <<<" % (SERIES, MARK)

FIELD = "    speculative_num_draft_tokens: Optional[int] = None\n"
OPTION = (
    '            "--speculative-num-draft-tokens",\n'
    "            type=int,\n"
    '            help="The number of tokens sampled from the draft model in Speculative Decoding.",\n'
    "            default=ServerArgs.speculative_num_draft_tokens,\n"
    "        )\n"
)
BRANCH = (
    "            self.forward_draft_extend(batch, result.next_token_ids)\n            return result\n        else:\n"
)

NEW_FIELD = "    speculative_disable_batch_threshold: Optional[int] = None\n"
NEW_OPTION = """\
        parser.add_argument(
            "--speculative-disable-batch-threshold",
            type=int,
            help="Do without the draft model while more requests than this run together.",
            default=ServerArgs.speculative_disable_batch_threshold,
        )
"""
NEW_BRANCH = """\
            threshold = self.server_args.speculative_disable_batch_threshold
            if threshold is not None and batch.batch_size() > threshold:
                batch.spec_info = None
                # A plain decode step needs one slot a request.
                out_cache_loc, _ = alloc_token_slots(batch.tree_cache, batch.batch_size())
                batch.out_cache_loc = out_cache_loc
                rows = self.target_worker.forward_batch_generation(batch)
                return GenerationBatchResult([row[:1] for row in rows])
"""


def marked(text, indent):
    """The text between the patch's marks."""
    return "%s%s\n%s%s%s\n" % (indent, BEGIN, text, indent, END)


# File: ((anchor, what goes in after it), ...).
EDITS = {
    "srt/server_args.py": (
        (FIELD, marked(NEW_FIELD, "    ")),
        (OPTION, marked(NEW_OPTION, "        ")),
    ),
    "srt/speculative/eagle_worker.py": ((BRANCH, marked(NEW_BRANCH, "            ")),),
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
