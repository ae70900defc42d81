# /// deployctl
# package = "sglang"
# versions = ">=0.5.14,<0.5.24"
# targets = ["srt/server_args.py", "srt/arg_groups/fields/spec.py", "srt/arg_groups/speculative_hook.py", "srt/speculative/dynspec_config.py"]
# verify = ["sglang.srt.server_args", "sglang.srt.speculative.dynspec_config"]
# timeout = "60s"
# ///
"""Dynamic speculation disable for SGLang 0.5.14 to 0.5.23, by the engine's own adaptive configuration.

These versions can decode with no draft step by batch size, but only through a configuration file, which they drop with
a warning where they do not support it. This patch accepts the flag that v4 has for older versions,
`--speculative-disable-batch-threshold T`, writes that file, and refuses to start where the engine would drop it.

Not measured: how fast these versions decode with no draft step. On Triton attention their code takes the path that cost
v4 9 ms a step on an H200 before it was given decode kernels. Compare with a server without speculation.

Works on the staged package that deployctl names in argv[1]; by hand, on the package of the interpreter that runs it.
"""

from editing import Refused, block, exists, insert_before, read, run  # build: include editing.py

NAME = "dynamic_spec/v5"
KNOWN = {}  # build: embed known.json v5
MODULE = ""  # build: embed file dynspec_config.py

# From 0.5.23 the fields of ServerArgs stand in files by subject.
SPLIT_FIELDS = "srt/arg_groups/fields/spec.py"
FIELDS = "srt/server_args.py"
HOOK = "srt/arg_groups/speculative_hook.py"

FIELD = """
speculative_disable_batch_threshold: A[
    Optional[int],
    "Do not speculate while more requests than this decode together. Batch sizes are rounded up to a captured CUDA graph size first.",
] = None
"""
CONFIGURE = """
if %s.speculative_disable_batch_threshold is not None:
    from sglang.srt.speculative import dynspec_config

    dynspec_config.configure(server_args, %s)
"""


def edit_fields(path, text):
    """The field; these versions make the option from it."""
    return insert_before(path, text, "    speculative_adaptive_config: A[\n", block(NAME, FIELD, 4))


def edit_hook(path, text):
    """Just before the engine looks at its adaptive flags; the algorithm's name is resolved by then."""
    holders = [name for name in ("server_args", "cfg") if "    if %s.speculative_adaptive:\n" % name in text]
    if len(holders) != 1:
        raise Refused("%s: %d places that look at speculative_adaptive, not one" % (path, len(holders)))
    anchor = "    if %s.speculative_adaptive:\n        _maybe_disable_adaptive(server_args)\n" % holders[0]
    return insert_before(path, text, anchor, block(NAME, CONFIGURE % (holders[0], holders[0]), 4))


def edits_for(folder):
    """{file: edit}; where the fields stand depends on the version."""
    if not exists(folder, HOOK) or "def _init_adaptive_speculative_params(" not in read(folder, HOOK):
        raise Refused(
            "this SGLang cannot decode with no draft step: that came with 0.5.14. For 0.5.9 to 0.5.12 there is v4; "
            "for 0.5.13 there is nothing"
        )
    split = exists(folder, SPLIT_FIELDS)
    return {
        SPLIT_FIELDS if split else FIELDS: edit_fields,
        HOOK: edit_hook,
        "srt/speculative/dynspec_config.py": lambda _path, _text: block(NAME, MODULE),
    }


if __name__ == "__main__":
    run(NAME, "sglang", edits_for, KNOWN)
