# /// deployctl
# package = "sglang"
# versions = ">=0.5.9,<0.5.13"
# targets = []  # build: list targets
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.eagle_worker", "sglang.srt.speculative.eagle_worker_v2"]
# timeout = "60s"
# ///
"""Dynamic speculation disable for the EAGLE workers of SGLang 0.5.9 to 0.5.12, v1 and v2 (overlap).

With `--speculative-disable-batch-threshold T` the engine drafts while at most T requests decode together, and decodes
plainly above. It works by verifying a draft tree that holds only its root, with a second set of attention backends and
CUDA graphs for one token a request; srt/speculative/dynspec/ says how.

Works on the staged package that deployctl names in argv[1]; by hand, on the package of the interpreter that runs it.
"""

from editing import Refused, block, exists, insert_after, run  # build: include editing.py

NAME = "dynamic_spec/v4"
KNOWN = {}  # build: embed known.json v4
MODULES = {}  # build: embed modules dynspec

FIELDS = """
speculative_disable_batch_threshold: Optional[int] = None
speculative_resume_batch_threshold: Optional[int] = None
"""
OPTIONS = """
parser.add_argument(
    "--speculative-disable-batch-threshold",
    type=int,
    help="Do not speculate while more requests than this decode together.",
    default=ServerArgs.speculative_disable_batch_threshold,
)
parser.add_argument(
    "--speculative-resume-batch-threshold",
    type=int,
    help="Once not speculating, go on without until at most this many requests decode together. "
    "Default: the same as --speculative-disable-batch-threshold.",
    default=ServerArgs.speculative_resume_batch_threshold,
)
"""
CHECK = """
from sglang.srt.speculative.dynspec import arguments as dynspec_arguments

dynspec_arguments.check(self)
"""
INSTALL_V1 = """
from sglang.srt.speculative.dynspec import worker_v1 as _dynspec  # noqa: E402

_dynspec.install(EAGLEWorker)
"""
INSTALL_V2 = """
from sglang.srt.managers import schedule_batch as _schedule_batch  # noqa: E402
from sglang.srt.speculative.dynspec import known_lengths as _known_lengths  # noqa: E402
from sglang.srt.speculative.dynspec import worker_v2 as _dynspec  # noqa: E402

_dynspec.install(EAGLEWorkerV2, EagleDraftWorker)
_known_lengths.install(EagleDraftInput, _schedule_batch.ScheduleBatch)
"""


def edit_server_args(path, text):
    """Two fields, their options, and the check that refuses what is not supported."""
    field = "    speculative_num_draft_tokens: Optional[int] = None\n"
    option = "            default=ServerArgs.speculative_num_draft_tokens,\n        )\n"
    text = insert_after(path, text, field, block(NAME, FIELDS, 4))
    text = insert_after(path, text, option, block(NAME, OPTIONS, 8))
    return insert_after(path, text, "    def check_server_args(self):\n", block(NAME, CHECK, 8))


def at_end(installation):
    """The edit of a worker's file: its classes are complete where it ends."""

    def edit(path, text):
        if not text.endswith("\n"):
            raise Refused("%s: its last line has no end" % path)
        return text + block(NAME, installation)

    return edit


def new_file(source):
    """The edit that makes a file of ours."""
    return lambda _path, _text: block(NAME, source)


def edits_for(folder):
    """{file: edit}."""
    if not exists(folder, "srt/speculative/eagle_worker.py"):
        raise Refused(
            "this SGLang has no EAGLEWorker: that worker ended with 0.5.12. For 0.5.14 and newer there is v5; "
            "for 0.5.13 there is nothing: its workers are others, and it cannot decode with no draft step"
        )
    edits = {
        "srt/server_args.py": edit_server_args,
        "srt/speculative/eagle_worker.py": at_end(INSTALL_V1),
        "srt/speculative/eagle_worker_v2.py": at_end(INSTALL_V2),
    }
    edits.update(("srt/speculative/" + name, new_file(source)) for name, source in MODULES.items())
    return edits


if __name__ == "__main__":
    run(NAME, "sglang", edits_for, KNOWN)
