# /// deployctl
# package = "sglang"
# versions = ">=0.5.9,<0.5.13"
# targets = ["srt/server_args.py", "srt/speculative/eagle_worker.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker"]
# known_bad = "seen on 0.5.12 (H200): ValueError: too many values to unpack (expected 2): alloc_token_slots returns a pair only with backup_state=True"
# timeout = "60s"
# ///
"""Second attempt: above the threshold, allocate the slots by hand.

Works on the staged package that deployctl names in argv[1]; by hand, on the package of the interpreter that runs it.
Standard library only, Python 3.8 and newer.
"""

import ast
import importlib.util
import os
import sys
import tempfile

NAME = "dynamic_spec/v2"
OPEN, CLOSE = "# >>> %s" % NAME, "# <<< %s" % NAME
FIELD = "    speculative_num_draft_tokens: Optional[int] = None\n"
OPTION = "            default=ServerArgs.speculative_num_draft_tokens,\n        )\n"

# Goes before the first statement of the decode branch of EAGLEWorker.forward_batch_generation.
# {counter} is the field that this version's GenerationBatchResult counts drafts with.
BODY = """
threshold = self.server_args.speculative_disable_batch_threshold
if threshold is not None and len(batch.reqs) > threshold:
    # The draft would have allocated: do it here, one slot a request, and decode without speculation.
    out_cache_loc, _ = alloc_token_slots(batch.tree_cache, len(batch.reqs))
    batch.out_cache_loc = out_cache_loc
    batch.spec_info = None
    model_worker_batch = batch.get_model_worker_batch()
    result = self.target_worker.forward_batch_generation(model_worker_batch)
    return GenerationBatchResult(
        logits_output=result.logits_output,
        next_token_ids=result.next_token_ids,
        {counter}=0,
        can_run_cuda_graph=result.can_run_cuda_graph,
    )
"""


def package_folder():
    """The folder to patch: argv[1], else where this interpreter would import sglang from."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("sglang is not installed for %s" % sys.executable)
    return list(spec.submodule_search_locations)[0]


def refuse_foreign(path, text):
    """Another version of this patch must be taken back first."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("# >>> dynamic_spec/") and line.strip() != OPEN:
            sys.exit("%s:%d is patched already by %s: roll back first" % (path, number, line.strip()[6:]))


def insert_once(path, text, anchor, addition):
    """`addition` behind `anchor`, which must occur exactly once."""
    if text.count(anchor) != 1:
        sys.exit("%s: the anchor %r occurs %d times, not once" % (path, anchor.strip(), text.count(anchor)))
    return text.replace(anchor, anchor + addition)


def patch_server_args(path, text):
    """The field and its command line option."""
    text = insert_once(
        path,
        text,
        FIELD,
        "    %s\n    speculative_disable_batch_threshold: Optional[int] = None\n    %s\n" % (OPEN, CLOSE),
    )
    option = (
        "        %s\n"
        "        parser.add_argument(\n"
        '            "--speculative-disable-batch-threshold",\n'
        "            type=int,\n"
        '            help="Do not speculate while more requests than this are running.",\n'
        "            default=ServerArgs.speculative_disable_batch_threshold,\n"
        "        )\n"
        "        %s\n"
    )
    return insert_once(path, text, OPTION, option % (OPEN, CLOSE))


def patch_worker(path, text):
    """The new branch, at an anchor that the syntax tree gives: it is the same from 0.5.9 to 0.5.12."""
    module = ast.parse(text)
    worker = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "EAGLEWorker"), None)
    method = worker and next(
        (n for n in worker.body if isinstance(n, ast.FunctionDef) and n.name == "forward_batch_generation"), None
    )
    branch = method and next((n for n in reversed(method.body) if isinstance(n, ast.If) and n.orelse), None)
    if not branch:
        sys.exit("%s: no decode branch in EAGLEWorker.forward_batch_generation" % path)
    counters = {
        keyword.arg
        for node in ast.walk(branch)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GenerationBatchResult"
        for keyword in node.keywords
        if keyword.arg and keyword.arg.startswith("num_") and not keyword.arg.endswith("_cpu")
    }
    if len(counters) != 1:
        sys.exit("%s: GenerationBatchResult counts drafts with %s" % (path, sorted(counters) or "nothing"))
    lines = text.splitlines(True)
    body = BODY.strip("\n").replace("{counter}", counters.pop())
    block = [" " * 12 + OPEN] + [" " * 12 + line if line else "" for line in body.split("\n")] + [" " * 12 + CLOSE]
    lines.insert(branch.orelse[0].lineno - 1, "\n".join(block) + "\n")
    return "".join(lines)


def replace_file(path, text):
    """Write beside the file, keep its mode, rename."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as out:
        out.write(text)
    os.chmod(temporary, os.stat(path).st_mode & 0o7777)
    os.replace(temporary, path)


def main():
    """Work out both files first, then write them."""
    folder = package_folder()
    edits = (("srt/server_args.py", patch_server_args), ("srt/speculative/eagle_worker.py", patch_worker))
    changed = []
    for relative, patch in edits:
        path = os.path.join(folder, relative)
        try:
            with open(path, encoding="utf-8", newline="") as source:
                text = source.read()
        except OSError as error:
            sys.exit("%s: %s" % (path, error.strerror))
        if OPEN in text:
            print("%s: already patched" % relative)
            continue
        refuse_foreign(relative, text)
        new = patch(relative, text)
        ast.parse(new)
        changed.append((path, relative, new))
    for path, relative, new in changed:
        replace_file(path, new)
        print("%s: patched" % relative)


if __name__ == "__main__":
    main()
