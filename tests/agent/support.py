"""A small real installation to work on: a venv with a package installed as a wheel, and ways to ask the agent."""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from deployctl.domain.patch import parse_metadata
from deployctl.remote.client import Exchange, Request
from deployctl.transport.local import LocalTransport

FILES = {
    "__init__.py": "",
    "version.py": '__version__ = "1.2.3"\n',
    "srt/__init__.py": "",
    "srt/args.py": "THRESHOLD = 0\n\n\ndef threshold():\n    return THRESHOLD\n",
    "srt/worker.py": "from fakesgl.srt import args\n\n\ndef run(batch):\n    return batch + args.threshold()\n",
    "srt/data.json": '{"a": 1}\n',
}


def make_venv(root: Path, python: str = sys.executable) -> Path:
    """A venv without pip, for speed."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(root / "ml-env")], check=True)
    return root / "ml-env" / "bin" / "python3"


def install(python: Path, files: dict[str, str] = FILES, name: str = "fakesgl", version: str = "1.2.3") -> Path:
    """Install a package into a venv as a wheel install would; returns its folder."""
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    record = []
    for path, text in files.items():
        target = site / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name}/{path},sha256={digest},{len(text.encode())}")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nText\n")
    (info / "RECORD").write_text("\n".join([*record, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n")
    return site / name


class Box:
    """A host on this machine: home, venv, package, and the agent over a local transport."""

    transport = LocalTransport

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir(parents=True)
        self.python = make_venv(root, python)
        self.package = install(self.python)
        self.host = {
            "name": "box",
            "package": "fakesgl",
            "state_dir": str(root / "state dir"),
            "log_dir": str(root / "logs"),
            "gpu": {"devices": str(root / "dev" / "nvidia[0-9]*"), "clean": "ours"},
            "limits": {"term_grace_s": 3, "kill_patience_s": 5, "gpu_memory_s": 3, "burst_s": 10},
        }
        self.env = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
        }
        self.events: list[dict] = []
        self.run_id = "run-1"
        self.pushes = 0
        self.on_event = None
        self.answer = ...
        self.operator = "ann@example.org"

    def request(self, operation: str, args: dict, blobs: dict[str, bytes] | None = None) -> Request:
        return Request(
            operation=operation,
            python=str(self.python),
            host=self.host,
            args=args,
            blobs=blobs or {},
            run_id=self.run_id,
            operator=self.operator,
            command=operation,
        )

    def ask(self, operation: str, blobs: dict[str, bytes] | None = None, **args) -> dict:
        """Run one operation to its verdict; events are kept in `events`."""
        self.events = []
        with (
            self.transport(self.env) as transport,
            Exchange(transport, self.request(operation, args, blobs)) as exchange,
        ):
            for event in exchange.events():
                self.events.append(event)
        assert exchange.result is not None
        return exchange.result

    def patch(self, reference: str, script: str, filename: str | None = None) -> tuple[dict, dict[str, bytes]]:
        """The push arguments of a patch text."""
        series, _, version = reference.partition("/")
        kind = "diff" if script.lstrip().startswith(("---", "diff ")) else "script"
        content = script.encode()
        described = {
            "ref": reference,
            "series": series,
            "version": version,
            "kind": kind,
            "filename": filename or f"{version}.py",
            "sha256": hashlib.sha256(content).hexdigest(),
            "metadata": parse_metadata(script, reference, kind).as_request(),
        }
        return described, {"patch": content}

    def push(self, reference: str, script: str, **args) -> dict:
        patch, blobs = self.patch(reference, script)
        return self.ask("push", blobs, patch=patch, transaction=args.pop("transaction", "t1"), **args)

    def tree(self) -> dict[str, str]:
        """path → text of the live package, bytecode left out."""
        return {
            str(path.relative_to(self.package)): path.read_text()
            for path in sorted(self.package.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }


HEADER = '# /// deployctl\n# package = "fakesgl"\n# targets = {targets}\n# ///\n'


def edit(targets: list[str], body: str) -> str:
    """A staged patch script."""
    quoted = "[" + ", ".join(f'"{target}"' for target in targets) + "]"
    return HEADER.format(targets=quoted) + "import sys, os, pathlib\nroot = pathlib.Path(sys.argv[1])\n" + body


def threshold(value: int) -> str:
    """A patch that sets THRESHOLD."""
    return edit(
        ["srt/args.py"],
        f"p = root / 'srt/args.py'\np.write_text(p.read_text().replace('THRESHOLD = 0', 'THRESHOLD = {value}'))\n",
    )


class MemoryWire:
    """A wire without processes, for tests in this process.

    `on_event`, where given, is called with every event: a test can cancel, edit or measure at that very moment.
    """

    def __init__(self, blobs=None, on_event=None):
        import threading

        self.on_event = on_event

        self.events = []
        self.sent = io.BytesIO()
        self.blobs = blobs or {}
        self.cancelled = threading.Event()
        self.gone = threading.Event()
        self.answer = {"control": "commit"}

    def event(self, kind, /, **fields):
        self.events.append(dict(fields, event=kind))
        if self.on_event is not None:
            self.on_event(self, self.events[-1])

    def data(self, payload):
        self.sent.write(payload)

    def await_control(self, words, deadline_s):
        return self.answer


def make_context(box: Box, operation: str, args: dict | None = None, blobs: dict[str, bytes] | None = None):
    """A Context of the agent in this process, for `box`; its events are in `context.wire.events`."""
    from deployctl.agent.main import Context

    request = {
        "op": operation,
        "args": args or {},
        "host": box.host,
        "operator": box.operator,
        "run_id": box.run_id,
        "command": operation,
    }
    context = Context(request, MemoryWire(blobs, box.on_event), [str(box.package.parent)], {})
    if box.answer is not ...:
        context.wire.answer = box.answer
    context.python = str(box.python)
    return context


def perform(box: Box, operation: str, blobs: dict[str, bytes] | None = None, **args) -> dict:
    """Run one operation of the agent in this process; events are kept in `box.events`."""
    from deployctl.agent import main

    context = make_context(box, operation, args, blobs)
    result = main.perform(context)
    box.events = context.wire.events
    return json.loads(json.dumps(result))


def perform_push(box: Box, reference: str, script: str, **args) -> dict:
    """Push in this process; every push has a transaction of its own."""
    patch, blobs = box.patch(reference, script)
    box.pushes += 1
    return perform(box, "push", blobs, **{"transaction": f"tx{box.pushes}", "patch": patch, **args})


def everything(package: Path) -> dict[str, tuple]:
    """All that must come back: path → kind, mode, owner and content of every file, folder and link; no bytecode."""
    found: dict[str, tuple] = {}
    for path in sorted(package.rglob("*")):
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        status = path.lstat()
        about = (oct(status.st_mode & 0o7777), status.st_uid, status.st_gid)
        name = os.fsdecode(path.relative_to(package))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path), path.read_bytes() if path.is_file() else None)
        elif path.is_dir():
            found[name] = ("folder", *about)
        elif not path.is_file():
            found[name] = ("odd", *about)
        else:
            found[name] = ("file", *about, path.read_bytes())
    return found
