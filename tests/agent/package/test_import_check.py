"""A changed package compiles, imports, and what is imported is what was patched."""

import hashlib
import os
import subprocess
import threading
from pathlib import Path

import pytest
from pythons import context_for
from support import MemoryWire, install, make_venv
from test_script_run import wait_for

from deployctl.agent import verify
from deployctl.agent.failure import Cancelled, Failure


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A venv of its own."""
    return make_venv(tmp_path_factory.mktemp("venv of the server"))


@pytest.fixture
def place(python, tmp_path, monkeypatch):
    """The package, installed anew, and an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    package = install(python)
    yield package
    for path in sorted(package.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def entry(package, path):
    content = (package / path).read_bytes()
    module = verify.module_name(path, "fakesgl")
    return (module, os.path.realpath(package / path), hashlib.sha256(content).hexdigest())


def check(python, wanted, timeout_s=60.0, wire=None):
    return verify.import_modules(context_for(python, wire=wire), wanted, timeout_s)


def failing(python, wanted, timeout_s=60.0):
    with pytest.raises(Failure) as caught:
        check(python, wanted, timeout_s)
    return caught.value


def test_imports_and_proves(python, place):
    """Modules of the package and others are imported, the patched ones from their very files; no bytecode is left."""
    wanted = [
        entry(place, "srt/args.py"),
        entry(place, "srt/worker.py"),
        entry(place, "__init__.py"),
        ("json", None, None),
    ]
    assert ["fakesgl.srt.args", "fakesgl.srt.worker", "fakesgl", "json"] == check(python, wanted)
    assert [] == list(place.rglob("*.pyc"))
    assert [] == check(python, [])


def test_noise_threads_and_forks_do_not_disturb(python, place):
    """A module that prints megabytes, starts threads and forks children that outlive it."""
    (place / "srt/args.py").write_text(
        "import os, threading, time, sys\n"
        "print('y' * 3_000_000)\n"
        "threading.Thread(target=lambda: time.sleep(600)).start()\n"
        "if os.fork() == 0:\n    time.sleep(600)\n"
        "class Broken:\n    def flush(self): raise OSError\n"
        "sys.stdout = Broken()\n"
    )
    assert ["fakesgl.srt.args"] == check(python, [entry(place, "srt/args.py")])


def test_very_many_modules(python, place):
    """More modules than one argument of a program can hold."""
    module, path, digest = entry(place, "srt/args.py")
    wanted = [(module, path, digest)] * 1500
    assert 1500 == len(check(python, wanted))


def test_import_error_shows_the_patched_line(python, place):
    """The cause in the first line, then the end of the traceback: our probe and the import machinery left out, the
    patched file marked.
    """
    (place / "srt/args.py").write_text("import nowhere_at_all\n")
    failure = failing(python, [entry(place, "srt/worker.py"), entry(place, "srt/args.py")])
    assert "import" == failure.kind
    first, *rest = failure.message.splitlines()
    assert "import fakesgl.srt.worker failed: ModuleNotFoundError: No module named 'nowhere_at_all'" == first
    marked = [line for line in rest if line.endswith("<-- patched file")]
    assert [
        f'  File "{place}/srt/worker.py", line 1, in <module>',
        f'  File "{place}/srt/args.py", line 1, in <module>',
    ] == [line.removesuffix("   <-- patched file") for line in marked]
    assert "frozen importlib" not in failure.message
    assert "<string>" not in failure.message
    assert "    import nowhere_at_all" in rest


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("x = (1,\n", "SyntaxError"),
        ("raise ValueError('first\\nsecond')", "ValueError: first"),
    ],
)
def test_whatever_an_import_raises(python, place, text, cause):
    """Also what is no Exception, and messages of several lines."""
    (place / "srt/args.py").write_text(text + "\n")
    failure = failing(python, [entry(place, "srt/args.py")])
    assert failure.message.splitlines()[0].startswith(f"import fakesgl.srt.args failed: {cause}")


def test_an_interpreter_that_dies(python, place):
    """A crash of the interpreter names the module, the signal and what was printed last."""
    (place / "srt/args.py").write_text("import os\nprint('about to die', flush=True)\nos.kill(os.getpid(), 11)\n")
    failure = failing(python, [entry(place, "version.py"), entry(place, "srt/args.py")])
    assert "import fakesgl.srt.args ended the interpreter with signal SIGSEGV\n  | about to die" == failure.message
    assert "import fakesgl.srt.args" in failure.hint


def test_a_shadowed_package_is_not_taken_for_the_patched_one(python, place):
    """A copy in the home directory would be served: the patched file is not the one that is imported."""
    home = Path(os.environ["HOME"])
    (home / "fakesgl").mkdir()
    (home / "fakesgl/__init__.py").write_text("")
    (home / "fakesgl/version.py").write_text("")
    failure = failing(python, [entry(place, "version.py")])
    assert "not-the-patched-file" == failure.kind
    assert str(home / "fakesgl/version.py") in failure.message
    assert str(place / "version.py") in failure.message


def test_a_folder_without_init_is_no_file(python, place):
    """A module that came from no file at all is not said to be somewhere."""
    (place / "bare").mkdir()
    failure = failing(python, [("fakesgl.bare", str(place / "bare.py"), "0")])
    assert "imported from no file" in failure.message


def test_changed_meanwhile(python, place):
    """The content that is imported must be the content that was put there, and still be there."""
    module, path, digest = entry(place, "srt/args.py")
    assert "changed-meanwhile" == failing(python, [(module, path, "0" * 64)]).kind
    (place / "srt/args.py").write_text("import os\nos.unlink(__file__)\n")
    assert "changed-meanwhile" == failing(python, [(module, path, digest)]).kind


def test_old_bytecode_is_found(python, place):
    """Bytecode that looks current (same second, same size) but is of another text is not taken for the patched file."""
    target = place / "srt/args.py"
    target.write_text("V = 'old'\n")
    os.utime(target, (1_700_000_000, 1_700_000_000))
    subprocess.run([python, "-c", "import fakesgl.srt.args"], check=True, cwd=os.environ["HOME"])
    target.write_text("V = 'new'\n")
    os.utime(target, (1_700_000_000, 1_700_000_000))
    failure = failing(python, [entry(place, "srt/args.py")])
    assert "stale-bytecode" == failure.kind
    (cached,) = (place / "srt/__pycache__").glob("args.*")
    assert str(cached) in failure.hint
    cached.unlink()
    subprocess.run([python, "-c", "import fakesgl.srt.args"], check=True, cwd=os.environ["HOME"])
    assert ["fakesgl.srt.args"] == check(python, [entry(place, "srt/args.py")])


def test_the_deadline_names_the_module(python, place):
    """An import that hangs is named, and ended."""
    (place / "srt/args.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    failure = failing(python, [entry(place, "version.py"), entry(place, "srt/args.py")], 2.0)
    assert ("timeout", "import fakesgl.srt.args did not end within 2 s") == (failure.kind, failure.message)
    assert "verify_timeout" in failure.hint
    assert not os.path.exists(f"/proc/{int(failure.fields['output'])}")


def test_cancelling(python, place):
    """The client's leaving ends the check."""
    wire = MemoryWire()
    started = Path(os.environ["HOME"], "started")
    (place / "srt/args.py").write_text(f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)\n")
    thread = threading.Thread(target=lambda: (wait_for(started.exists), wire.cancelled.set()))
    thread.start()
    with pytest.raises(Cancelled):
        check(python, [entry(place, "srt/args.py")], wire=wire)
    thread.join()


def test_no_interpreter():
    """An interpreter that is not there is named, and nothing stays open."""
    before = os.listdir("/proc/self/fd")
    assert "/nowhere/python" in failing("/nowhere/python", [("json", None, None)]).message
    assert before == os.listdir("/proc/self/fd")


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("srt/layers/__init__.py", "sglang.srt.layers"),
        ("__init__.py", "sglang"),
        ("launch_server.py", "sglang.launch_server"),
        ("srt/my mod.py", None),
        ("srt/data.json", None),
        ("__main__.py", None),
        ("Šablony/x.py", "sglang.Šablony.x"),
    ],
)
def test_module_names(path, module):
    """The module of a file; None where importing makes no sense."""
    assert module == verify.module_name(path, "sglang")


def test_compiles_silently_without_bytecode(tmp_path, recwarn):
    """Good files of any encoding compile; a warning of the compiler is not printed, nor an error."""
    verify.compile_files(
        [
            ("a.py", b"x = '\\d'\nassert (1, 'x')\n"),
            ("b.py", b"# -*- coding: latin-1 -*-\ns = '\xe9'\r\n"),
            ("c.py", b"\xef\xbb\xbfx = 1\n"),
        ]
    )
    assert [] == list(recwarn)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"x = 1\n\tif True\n", ["srt/a.py:2 does not compile"]),
        (
            b"def f():\n\treturn (1\n",
            ["srt/a.py:2 does not compile: '(' was never closed", "    \treturn (1\n    \t       ^"],
        ),
        (b"x = 1 +\r\n", ["srt/a.py:1 ", "    x = 1 +\n"]),
        (b"x = '\xff'\n", ["srt/a.py", "utf-8"]),
        (b"\0\n", ["srt/a.py", "null bytes"]),
        (b"x = " + b"(" * 5000 + b")" * 5000, ["srt/a.py", "does not compile"]),
        (b"x = " + b"-" * 100_000 + b"1\n", ["srt/a.py does not compile: "]),
        (b"# coding: nonsense\n", ["srt/a.py does not compile: ", "nonsense"]),
    ],
)
def test_what_does_not_compile(content, parts):
    """File, line, text and a caret under the place."""
    with pytest.raises(Failure) as caught:
        verify.compile_files([("srt/a.py", content)])
    assert "compile" == caught.value.kind
    for part in parts:
        assert part in caught.value.message
