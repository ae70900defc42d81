"""Proves that a changed package works: it compiles, it imports, and what is imported is what was patched."""

import hashlib
import json
import os
import re
import warnings

from . import script
from .failure import Failure

# Runs in a fresh interpreter, started as the server would be: no -I, no -S, the home directory first on the path.
# Its findings go through a pipe of their own: libraries print what they like on stdout and stderr. What it needs only
# to report a failure it imports then: a bare start takes 12 ms, and json, hashlib and traceback as long again.
_PROBE = r"""
import sys, os, importlib
report = int(sys.argv[1])
modules, paths = sys.argv[2::2], sys.argv[3::2]
sys.argv[:] = ["deployctl-verify"]
def say(position, **finding):
    import json
    os.write(report, json.dumps(dict(finding, failed=position)).encode("ascii") + b"\n")
def check(position, name, path):
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        import traceback
        words = str(error).strip().splitlines()
        cause = type(error).__name__ + (": " + words[0] if words else "")
        say(position, cause=cause, traceback=traceback.format_exc())
        return False
    spec = getattr(module, "__spec__", None)
    origin = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    found = os.path.realpath(origin) if origin else None
    if path and found != path:
        say(position, found=found)
        return False
    # The file is the patched one; what ran may still be old bytecode that looks current.
    cached = getattr(spec, "cached", None)
    if path and cached and os.path.exists(cached) and hasattr(spec.loader, "get_code"):
        with open(found, "rb") as source:
            fresh = compile(source.read(), origin, "exec", dont_inherit=True)
        if spec.loader.get_code(spec.name) != fresh:
            say(position, stale=cached)
            return False
    return True
for position, name in enumerate(modules):
    os.write(report, b'{"began": %d}\n' % position)
    if not check(position, name, paths[position]):
        break
else:
    os.write(report, b'{"ok": true}\n')
for stream in (sys.stdout, sys.stderr):
    try:
        stream.flush()
    except Exception:
        pass
# Threads that an import started (progress monitors, GPU helpers) must not keep the check from ending.
os._exit(0)
"""

_FRAME = re.compile(r'^  File "(.+)", line \d+')
_TRACEBACK_LINES = 24


def module_name(path, package_name):
    """The module of a file, `srt/layers/__init__.py` → `sglang.srt.layers`.

    None for files that are no modules, and for `__main__.py`: importing it would run the program.
    """
    if not path.endswith(".py"):
        return None
    parts = path[:-3].split("/")
    if parts[-1] == "__main__":
        return None
    if parts[-1] == "__init__":
        parts.pop()
    if not all(part.isidentifier() for part in parts):
        return None
    return ".".join([package_name, *parts])


def compile_files(files):
    """Compile sources in this interpreter, which is the one that serves, without writing bytecode.

    Args:
        files: [(shown path, content bytes)].

    Raises:
        Failure: It does not compile (kind `compile`), with file:line, the line and a caret.
    """
    for shown, content in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a SyntaxWarning is no reason to stop, nor to print
                compile(content, shown, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise Failure(_syntax_error(shown, error), kind="compile", hint="mend the patch and push again") from error
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            # NUL bytes before 3.12; expressions nested too deeply for the parser.
            reason = str(error) or type(error).__name__
            raise Failure(
                "%s does not compile: %s" % (shown, reason), kind="compile", hint="mend the patch and push again"
            ) from error


def _syntax_error(shown, error):
    # Before 3.12 the position of an error inside an f-string counts from the f-string, not from the file.
    place = "%s:%d" % (shown, error.lineno) if error.lineno and error.filename == shown else shown
    lines = ["%s does not compile: %s" % (place, error.msg)]
    text = (error.text or "").rstrip("\r\n")
    if text:
        before = text[: max((error.offset or 1) - 1, 0)]
        # Tabs stay tabs, so that the caret stands under its character.
        lines += ["    " + text, "    " + re.sub(r"[^\t]", " ", before) + "^"]
    return "\n".join(lines)


def server_environment():
    """The environment that a server started by `launch` would have, without a profile's own variables."""
    return dict(os.environ, PYTHONDONTWRITEBYTECODE="1")


def import_modules(context, wanted, timeout_s):
    """Import modules in one fresh interpreter and prove which files they come from.

    Args:
        context: Of the operation.
        wanted: [(module, real path or None, sha256 or None)]; with a path, the module must come from exactly it.
        timeout_s: For all imports together.

    Returns:
        The module names, all imported.

    Raises:
        Failure: An import failed (kind `import`), came from another file (`not-the-patched-file`), ran old bytecode
            (`stale-bytecode`), or took too long (`timeout`).
        Cancelled: The client went away or asked to stop.
    """
    if not wanted:
        return []
    report, output = _Report([entry[0] for entry in wanted]), script.Output()
    read_end, write_end = os.pipe()
    try:
        try:
            argv = [context.python, "-c", _PROBE, str(write_end)]
            for module, path, _ in wanted:
                argv += [module, path or ""]
            process = script.start(
                argv, os.path.expanduser("~"), server_environment(), "the import check", pass_fds=(write_end,)
            )
        finally:
            os.close(write_end)
        try:
            sinks = {process.stdout.fileno(): output.feed, read_end: report.feed}
            script.follow(context, process, sinks, timeout_s, "the import check", lambda: report.last is not None)
        except Failure as failure:
            if failure.kind == "timeout":
                failure.message = "import %s did not end within %g s" % (report.module, timeout_s)
                failure.hint = "raise verify_timeout in the metadata of the patch, or name other modules in `verify`"
            failure.fields.setdefault("output", output.tail())
            raise
        finally:
            process.stdout.close()
    finally:
        os.close(read_end)
    if report.last is None:
        raise Failure(
            "import %s ended the interpreter with %s\n%s"
            % (report.module, script.describe(process.returncode), _end_of(output.tail())),
            kind="import",
            hint="run the import by hand on the host: %s -c 'import %s'" % (context.python, report.module),
        )
    if not report.last.get("ok"):
        raise _failure(report.last, report.module, wanted)
    for module, path, digest in wanted:
        if path and digest and _sha256(path) != digest:
            raise Failure(
                "%s (%s) changed while it was being checked" % (path, module),
                kind="changed-meanwhile",
                hint="something else writes to the package: end it, then push again",
            )
    return [entry[0] for entry in wanted]


def _sha256(path):
    try:
        with open(path, "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError:
        return None  # removed since: changed, too


class _Report:
    """What the probe has said so far: the module it is at, and its last word."""

    def __init__(self, modules):
        self._modules = modules
        self._rest = b""
        self.module = modules[0]
        self.last = None

    def feed(self, chunk):
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            finding = json.loads(line.decode("ascii"))
            if "began" in finding:
                self.module = self._modules[finding["began"]]
            else:
                self.last = finding


def _failure(finding, module, wanted):
    if "traceback" in finding:
        lines = _for_reader(finding["traceback"].rstrip().splitlines(), {path for _, path, _ in wanted if path})
        return Failure(
            "import %s failed: %s\n%s" % (module, finding["cause"], "\n".join(lines[-_TRACEBACK_LINES:])),
            kind="import",
            hint="mend the patch and push again; `verify` in its metadata says which modules are imported",
        )
    if "stale" in finding:
        return Failure(
            "%s runs old bytecode from %s, not its patched source" % (module, finding["stale"]),
            kind="stale-bytecode",
            hint="remove that file on the host and push again: rm '%s'" % finding["stale"],
        )
    return Failure(
        "%s was imported from %s, not from the patched %s"
        % (module, finding["found"] or "no file (a folder without __init__.py)", wanted[finding["failed"]][1]),
        kind="not-the-patched-file",
        hint="another copy shadows it for this interpreter: look at PYTHONPATH and the home directory",
    )


def _for_reader(lines, patched):
    """A traceback without the frames of the import machinery and of the probe, the patched files marked."""
    kept, skipping = [], False
    for line in lines:
        frame = _FRAME.match(line)
        if frame:
            path = frame.group(1)
            skipping = (
                path == "<string>"
                or path.startswith("<frozen importlib")
                or path.endswith(os.path.join("importlib", "__init__.py"))
            )
            if os.path.realpath(path) in patched:
                line += "   <-- patched file"  # noqa: PLW2901 - the line as it is shown
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return kept


def _end_of(text, most=12):
    return "\n".join("  | " + line for line in text.rstrip().splitlines()[-most:])
