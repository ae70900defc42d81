"""The package side of the agent under every interpreter that a server may have."""

import pytest
from pythons import all_pythons, run_agent
from support import install, make_venv

BODY = r"""
import os, subprocess, time
from deployctl_agent import package, script, unified, verify, versions
found = package.locate(context)
place = found.directory
def sha(path):
    import hashlib
    with open(os.path.join(place, path), "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()
def entry(path):
    return (verify.module_name(path, "fakesgl"), os.path.join(place, path), sha(path))
def write(path, text, second):
    with open(os.path.join(place, path), "w") as out:
        out.write(text)
    os.utime(os.path.join(place, path), (second, second))
answer = {
    "kind": found.kind,
    "version": found.version,
    "differing": package.differing_from_origin(found, {path: sha(path) for path in found.record}),
    "fits": [versions.satisfies(found.version, spec) for spec in (">=1.2,<2", "~=1.2.4", "==1.2.*")],
    "nonsense": attempt(lambda: versions.satisfies("1", "~=1"))["kind"],
}
diff = b"--- a/fakesgl/srt/args.py\n+++ b/fakesgl/srt/args.py\n@@ -1,1 +1,1 @@\n-THRESHOLD = 0\n+THRESHOLD = 7\n"
(one,) = unified.parse(diff)
(path,) = unified.target_paths([one], "fakesgl", found.record.__contains__)
with open(os.path.join(place, path), "rb") as source:
    answer["applied"] = unified.apply(source.read(), one, path).decode().splitlines()[0]
answer["misfit"] = attempt(lambda: unified.apply(b"x\n", one, path))["kind"]
program = "import sys; print('\u00e9' * 500000); sys.exit(3)"
status, tail = script.run(context, [sys.executable, "-X", "utf8", "-c", program], ".", dict(os.environ), 60, "it")
answer["run"] = [status, set(tail.strip()) == {"\u00e9"}]
slow = [sys.executable, "-c", "import time; time.sleep(600)"]
answer["slow"] = attempt(lambda: script.run(context, slow, ".", dict(os.environ), 0.3, "it"))["kind"]
answer["broken"] = [
    attempt(lambda content=content: verify.compile_files([("x.py", content)]))["message"].splitlines()[0].split(": ")[0]
    for content in (b"x = 1\ny = (\n", b"\0", b"x = " + b"-" * 200000 + b"1")
]
verify.compile_files([("x.py", b"x = '\\d'\r\n")])
write("srt/args.py", "V = 'old'\n", 1700000000)
subprocess.check_call([sys.executable, "-c", "import fakesgl.srt.args"], cwd=os.path.expanduser("~"))
answer["verified"] = verify.import_modules(context, [entry("srt/args.py"), entry("__init__.py"), ("json", None, None)], 60)
write("srt/args.py", "V = 'new'\n", 1700000000)
answer["stale"] = attempt(lambda: verify.import_modules(context, [entry("srt/args.py")], 60))["kind"]
write("srt/args.py", "V = missing\n", 1700000005)
failure = attempt(lambda: verify.import_modules(context, [entry("srt/args.py")], 60))
answer["import"] = failure["message"].splitlines()[0]
answer["marked"] = [line.strip() for line in failure["message"].splitlines() if line.endswith("patched file")]
"""


@pytest.mark.parametrize("interpreter", all_pythons())
def test_under_every_interpreter(interpreter, tmp_path):
    """Locate, compare, judge, apply, run, compile and import give the same answers under every interpreter."""
    python = make_venv(tmp_path, str(interpreter))
    place = install(python)
    home = tmp_path / "home"
    home.mkdir()
    answer = run_agent(python, BODY, home)
    marked = answer.pop("marked")
    assert [f'File "{place}/srt/args.py", line 1, in <module>   <-- patched file'] == marked
    assert {
        "kind": "wheel",
        "version": "1.2.3",
        "differing": [],
        "fits": [True, False, True],
        "nonsense": "bad-version",
        "applied": "THRESHOLD = 7",
        "misfit": "hunk-failed",
        "run": [3, True],
        "slow": "timeout",
        "broken": ["x.py:2 does not compile", "x.py does not compile", "x.py does not compile"],
        "verified": ["fakesgl.srt.args", "fakesgl", "json"],
        "stale": "stale-bytecode",
        "import": "import fakesgl.srt.args failed: NameError: name 'missing' is not defined",
    } == answer


def test_interpreters_from_the_floor_on_are_here():
    """The oldest interpreter that the agent promises to run on is among them."""
    assert any(each.id.startswith("3.8.") for each in all_pythons())
