"""Proves that a changed package works: it compiles, it imports, and what is imported is what was patched."""

import json
import os
import subprocess
import tempfile
import time

from . import script
from .failure import Cancelled, Failure

# Runs in a fresh interpreter, started as the server would be: no -I, no -S, the home directory first on the path.
# Its findings go to a file: libraries print what they like on stdout and stderr.
_PROBE = r"""
import sys, json, hashlib, importlib, traceback, os
report, wanted = sys.argv[1], json.loads(sys.argv[2])
sys.argv[:] = ["deployctl-verify"]
done = []
def finish(error):
    with open(report, "w", encoding="utf-8") as out:
        json.dump({"done": done, "error": error}, out)
for name, path, digest in wanted:
    try:
        module = importlib.import_module(name)
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt):
            raise
        finish({"module": name, "traceback": traceback.format_exc()})
        sys.stdout.flush()
        os._exit(3)
    found = os.path.realpath(getattr(module, "__file__", None) or "")
    if path and found != path:
        finish({"module": name, "found": found})
        os._exit(4)
    if digest:
        with open(found, "rb") as source:
            if hashlib.sha256(source.read()).hexdigest() != digest:
                finish({"module": name, "changed": found})
                os._exit(5)
    done.append([name, found])
finish(None)
sys.stdout.flush()
# Threads that an import started (progress monitors, GPU helpers) must not keep the check from ending.
os._exit(0)
"""


def module_name(path, package_name):
    """The module of a file, `srt/layers/__init__.py` → `sglang.srt.layers`; None for files that are no modules."""
    if not path.endswith(".py"):
        return None
    parts = path[:-3].split("/")
    if parts[-1] == "__init__":
        parts.pop()
    if not all(part.isidentifier() for part in parts):
        return None
    return ".".join([package_name] + parts)


def compile_files(files):
    """Compile sources without writing bytecode.

    Args:
        files: [(shown path, content bytes)].

    Raises:
        Failure: A syntax error, with file:line, the line and a caret.
    """
    for shown, content in files:
        try:
            compile(content, shown, "exec", dont_inherit=True)
        except SyntaxError as error:
            text = (error.text or "").rstrip("\n")
            pointer = " " * max((error.offset or 1) - 1, 0) + "^"
            raise Failure(
                "%s:%s does not compile: %s\n    %s\n    %s" % (shown, error.lineno, error.msg, text, pointer),
                kind="compile",
                hint="mend the patch and push again",
            ) from error
        except ValueError as error:
            raise Failure("%s does not compile: %s" % (shown, error), kind="compile") from error


def server_environment(context):
    """The environment that a server started by `launch` would have, without a profile's own variables."""
    environment = dict(os.environ)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


def import_modules(context, wanted, timeout_s):
    """Import modules in one fresh interpreter and prove which files they come from.

    Args:
        context: Of the operation.
        wanted: [(module, real path or None, sha256 or None)]; with a path, the module must come from exactly it.
        timeout_s: For all imports together.

    Returns:
        The module names, all imported.

    Raises:
        Failure: An import failed (kind `import`), came from another file (`not-the-patched-file`), or took too long.
        Cancelled: The client went away or asked to stop.
    """
    if not wanted:
        return []
    handle, report = tempfile.mkstemp(prefix="deployctl-verify-")
    os.close(handle)
    try:
        argv = [context.python, "-c", _PROBE, report, json.dumps([list(entry) for entry in wanted])]
        status, tail = _run_quietly(context, argv, timeout_s)
        try:
            with open(report, encoding="utf-8") as source:
                outcome = json.load(source)
        except ValueError:
            outcome = None
    finally:
        os.unlink(report)
    names = ", ".join(entry[0] for entry in wanted)
    if outcome is None:
        raise Failure(
            "the import check of %s ended with %s before it could report\n%s" % (names, script.describe(status), tail),
            kind="import",
            hint="run the import by hand on the host",
        )
    error = outcome["error"]
    if error is None:
        return [name for name, _ in outcome["done"]]
    if "traceback" in error:
        lines = _own_frames(error["traceback"].rstrip().splitlines())
        raise Failure(
            "import %s failed: %s\n%s" % (error["module"], lines[-1], "\n".join(lines[-16:])),
            kind="import",
            hint="mend the patch and push again; `verify` in its metadata says which modules are imported",
        )
    if "found" in error:
        path = next(entry[1] for entry in wanted if entry[0] == error["module"])
        raise Failure(
            "%s was imported from %s, not from the patched %s" % (error["module"], error["found"] or "nowhere", path),
            kind="not-the-patched-file",
            hint="another copy of the package shadows it for this interpreter: look at PYTHONPATH and the home directory",
        )
    raise Failure("%s changed while it was being checked" % error["changed"], kind="changed-meanwhile")


def _own_frames(lines):
    """A traceback without the import machinery's frames: what is left is where the reader must look."""
    kept, skipping = [], False
    for line in lines:
        if line.startswith("  File "):
            skipping = line.startswith(('  File "<frozen importlib', '  File "<string>"')) or (
                os.sep + "importlib" + os.sep + "__init__.py" in line
            )
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return kept


def _run_quietly(context, argv, timeout_s):
    """Like script.run, without output events: an engine's import warnings are nobody's concern when it works."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            cwd=os.path.expanduser("~"),
            env=server_environment(context),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        end = time.monotonic() + timeout_s
        pause = 0.002
        try:
            while process.poll() is None:
                if context.wire.cancelled.is_set():
                    raise Cancelled("the import check was cancelled")
                if time.monotonic() > end:
                    raise Failure(
                        "the import check did not end within %g s" % timeout_s,
                        kind="timeout",
                        hint="raise verify_timeout in the metadata of the patch, or name fewer modules in `verify`",
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
        finally:
            script.end_group(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 4096))
        return process.returncode, output.read().decode("utf-8", "backslashreplace")
