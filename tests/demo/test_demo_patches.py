"""The demo's patches: all import, two crash a burst in the way that is told, the third does what was wished."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from demo_engine import Engine

from deployctl.demo.site import package_directory, patches_source
from deployctl.domain import patch as patches

VERSIONS = ("v1", "v2", "v3")
TARGETS = ("srt/server_args.py", "srt/speculative/eagle_worker.py")
WORKER = "srt/speculative/eagle_worker.py"
SERVE = ("--speculative-algorithm", "EAGLE3", "--standin-step-ms", "10", "--decode-log-interval", "1")
THRESHOLD = ("--speculative-disable-batch-threshold", "9")


@pytest.fixture
def copy(site, tmp_path):
    """A copy of the installed package, as a stage is."""
    shutil.copytree(package_directory(site), tmp_path / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "sglang"


def apply(version, package):
    script = patches_source() / "dynamic_spec" / f"{version}.py"
    return subprocess.run([sys.executable, script, package], capture_output=True, text=True, check=False)


def contents(package):
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def patched_engine(site, copy, version, *options):
    done = apply(version, copy)
    assert 0 == done.returncode, done.stderr
    return Engine(site, *SERVE, *options, PYTHONPATH=str(copy.parent))


def frames(log):
    """(path in the package, line, text) of the first traceback."""
    traceback = log[log.index("Scheduler hit an exception: Traceback") :]
    return re.findall(r'  File ".*/sglang/(.*)", line (\d+), in .*\n    (.*)\n', traceback)


def added_lines(site, copy, path):
    """Numbers of the lines that the patched file has and the original lacks."""
    original = package_directory(site) / path
    done = subprocess.run(["diff", original, copy / path], capture_output=True, text=True, check=False)
    numbers = set()
    for first, last in re.findall(r"^\d+a(\d+)(?:,(\d+))?$", done.stdout, re.MULTILINE):
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


@pytest.mark.parametrize("version", VERSIONS)
def test_the_metadata_says_what_the_script_does(copy, version):
    """The block is valid, and names exactly the files that change; nothing is removed, only added."""
    metadata = patches.load(f"dynamic_spec/{version}", patches_source().parent).metadata
    assert TARGETS == tuple(metadata.targets)
    before = contents(copy)
    assert 0 == apply(version, copy).returncode
    after = contents(copy)
    assert set(TARGETS) == {path for path in after if after[path] != before.get(path)}
    assert before.keys() == after.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_applying_twice_changes_nothing(copy, version):
    """The second run says so."""
    apply(version, copy)
    once = contents(copy)
    again = apply(version, copy)
    assert (0, f"nothing to do: dynamic_spec {version} is already applied\n") == (again.returncode, again.stdout)
    assert once == contents(copy)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "path_and_anchor",
    [
        ("srt/server_args.py", "    speculative_num_draft_tokens: Optional[int] = None\n"),
        ("srt/server_args.py", "            default=ServerArgs.speculative_num_draft_tokens,\n"),
        (WORKER, "        else:\n"),
    ],
)
def test_a_missing_anchor_is_refused_with_the_tree_unchanged(copy, version, path_and_anchor):
    """The message names the file and shows the text that was looked for."""
    path, anchor = path_and_anchor
    text = (copy / path).read_text()
    assert 1 == text.count(anchor)
    (copy / path).write_text(text.replace(anchor, "    # changed by somebody\n"))
    before = contents(copy)
    done = apply(version, copy)
    assert 1 == done.returncode
    assert f"{copy / path}: expected exactly once, found 0 times:" in done.stderr
    assert "Traceback" not in done.stderr
    assert before == contents(copy)


def test_another_version_of_the_series_is_refused(copy):
    """Versions replace each other from the original, they do not pile up."""
    apply("v1", copy)
    before = contents(copy)
    done = apply("v2", copy)
    assert 1 == done.returncode
    assert "another version of dynamic_spec is in this file" in done.stderr
    assert before == contents(copy)


@pytest.mark.parametrize("argument", [[], ["/nonexistent"]])
def test_a_wrong_argument_is_said_plainly(argument):
    """Usage, or the file that is not there."""
    script = patches_source() / "dynamic_spec" / "v3.py"
    done = subprocess.run([sys.executable, script, *argument], capture_output=True, text=True, check=False)
    assert 1 == done.returncode
    assert ("/nonexistent/srt/server_args.py" if argument else "usage: v3.py PACKAGE_DIRECTORY") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_them_pass_an_import_check(site, copy, version):
    """That is the trap: what imports need not run."""
    apply(version, copy)
    code = "import sglang.srt.server_args as a, sglang.srt.speculative.eagle_worker as e; print(e.__file__)"
    done = subprocess.run(
        [site, "-c", code],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert str(copy / WORKER) == done.stdout.strip()


@pytest.mark.parametrize("version", VERSIONS)
def test_without_the_flag_nothing_changes(site, copy, version):
    """A patched engine without a threshold answers a burst as before."""
    with patched_engine(site, copy, version) as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(12))
        assert "accept len: 1.00" not in engine.log


@pytest.mark.parametrize(
    ("version", "cause", "raised_in"),
    [
        (
            "v1",
            "RuntimeError: The size of tensor a (160) must match the size of tensor b (2) at non-singleton dimension 0",
            "srt/tensors.py",
        ),
        ("v2", "ValueError: too many values to unpack (expected 2)", WORKER),
    ],
)
def test_the_failed_attempts_work_alone_and_crash_in_a_burst(site, copy, version, cause, raised_in):
    """One request is answered; ten at once end the server, and the stack passes through a line of the patch."""
    with patched_engine(site, copy, version, *THRESHOLD) as engine:
        engine.wait_ready()
        assert engine.generate("alone")
        assert not any(isinstance(answer, str) for answer in engine.burst(10, tokens=200))
        assert -signal.SIGKILL == engine.wait_end()
        assert cause in engine.log
        stack = frames(engine.log)
        added = added_lines(site, copy, WORKER)
        assert [WORKER] == [path for path, line, _ in stack if path == WORKER and int(line) in added]
        assert raised_in == stack[-1][0]


def test_the_third_attempt_does_what_was_wished(site, copy):
    """Above the threshold one token a step, below it two; a burst is answered as by the unpatched engine."""
    with patched_engine(site, copy, "v3", *THRESHOLD) as engine:
        engine.wait_ready()
        alone = engine.generate("prompt 3", 60)
        answers = engine.burst(10, tokens=60)
        assert alone == answers[3]
        assert all(60 == len(answer.split()) for answer in answers)
        engine.wait_for(r"\[dynamic_spec\] speculation OFF at 10 running requests")
        assert re.search(r"#running-req: 10, .*accept len: 1\.00", engine.log)
        assert engine.generate("after", 10)
        engine.wait_for(r"\[dynamic_spec\] speculation ON at \d running requests")
        assert re.search(r"#running-req: 1, .*accept len: 2\.00", engine.log[engine.log.index("speculation ON") :])
        assert '"speculative_disable_batch_threshold": 9' in engine.request("/server_info")[1]


def test_the_third_attempt_makes_no_graph_where_none_is_wanted(site, copy):
    """With --disable-cuda-graph its steps are eager like all others."""
    with patched_engine(site, copy, "v3", *THRESHOLD, "--disable-cuda-graph") as engine:
        engine.wait_ready()
        assert all(isinstance(text, str) for text in engine.burst(10, tokens=60))
        assert re.search(r"#running-req: 10, .*accept len: 1\.00", engine.log)
        assert "cuda graph: True" not in engine.log


@pytest.mark.parametrize("options", [("--speculative-algorithm", "EAGLE3", *THRESHOLD[:1], "-1"), THRESHOLD])
def test_the_third_attempt_checks_its_argument(site, copy, options):
    """A negative threshold and one without speculation are refused at once."""
    apply("v3", copy)
    with Engine(site, *options, PYTHONPATH=str(copy.parent)) as engine:
        assert 1 == engine.wait_end()
        assert "AssertionError: the threshold" in engine.log
