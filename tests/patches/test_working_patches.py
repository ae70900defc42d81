"""v4 and v5 on the wheels they are for, through deployctl's own push pipeline and by hand."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import PROJECT, Engine, fields_of, texts_of

from deployctl.domain import patch as patches

FLAG = "speculative_disable_batch_threshold"
RESUME = "speculative_resume_batch_threshold"
V4 = ("0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1")
V5 = ("0.5.14", "0.5.18", "0.5.23")
WORKER = "srt/speculative/eagle_worker.py"
MODULES = sorted(path.name for path in (PROJECT / "patches/dynamic_spec/src/dynspec").glob("*.py"))


def by_hand(version: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = PROJECT / "patches" / "dynamic_spec" / f"{version}.py"
    return subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("engine_version", V4)
def test_v4_through_the_pipeline(tmp_path, installed, engine_version):
    """All targets and nothing else change, all parse, flags and fields are there once, and rollback is byte for byte."""
    engine = Engine(tmp_path, *installed(engine_version))
    before = engine.files()
    result = engine.push("v4")
    assert result["status"] == "pushed", result["error"]
    targets = patches.load("dynamic_spec/v4", PROJECT).metadata.targets
    assert sorted(targets) == sorted(file["path"] for file in result["files"])
    after = engine.files()
    assert set(after) - set(before) == {f"srt/speculative/dynspec/{name}" for name in MODULES}
    for file in result["files"]:
        ast.parse(after[file["path"]])
    arguments = after["srt/server_args.py"].decode()
    for name in (FLAG, RESUME):
        assert fields_of(arguments).count(name) == 1
        assert texts_of(arguments).count("--" + name.replace("_", "-")) == 1
    for worker, call in ((WORKER, "_dynspec.install(EAGLEWorker)"),):
        assert after[worker].decode().rstrip().splitlines()[-2] == call
    unmarked = re.compile(rb"^ *# >>> dynamic_spec/v4 .*?# <<< dynamic_spec/v4\n", re.DOTALL | re.MULTILINE)
    for path, content in before.items():
        assert unmarked.sub(b"", after[path]) == content
    assert engine.push("v4")["status"] == "unchanged"
    assert engine.push("v3")["status"] == "pushed"
    assert set(engine.files()) == set(before)
    assert engine.push("v4")["status"] == "pushed"
    assert engine.files() == after
    assert engine.rollback()["status"] == "rolled_back"
    assert engine.files() == before


@pytest.mark.parametrize("engine_version", V5)
def test_v5_through_the_pipeline(tmp_path, installed, engine_version):
    """The field where that version keeps them, the hook, the module; rollback is byte for byte."""
    engine = Engine(tmp_path, *installed(engine_version))
    before = engine.files()
    result = engine.push("v5")
    assert result["status"] == "pushed", result["error"]
    fields = "srt/arg_groups/fields/spec.py" if engine_version == "0.5.23" else "srt/server_args.py"
    changed = {fields, "srt/arg_groups/speculative_hook.py", "srt/speculative/dynspec_config.py"}
    assert changed == {file["path"] for file in result["files"]}
    after = engine.files()
    for path in changed:
        ast.parse(after[path])
    assert fields_of(after[fields].decode()).count(FLAG) == 1
    hook = next(
        node
        for node in ast.parse(after["srt/arg_groups/speculative_hook.py"]).body
        if isinstance(node, ast.FunctionDef) and node.name == "handle_speculative_decoding"
    )
    calls = [node for node in ast.walk(hook) if isinstance(node, ast.Attribute) and node.attr == "configure"]
    assert len(calls) == 1
    assert engine.push("v5")["status"] == "unchanged"
    assert engine.rollback()["status"] == "rolled_back"
    assert engine.files() == before


@pytest.mark.parametrize("version", ["v4", "v5"])
def test_0_5_13_is_refused(tmp_path, installed, package, version):
    """By deployctl for its version, and by the script alone for what it holds, which says what there is instead."""
    engine = Engine(tmp_path, *installed("0.5.13"))
    before = engine.files()
    result = engine.push(version)
    assert (result["exit"], result["error"]["kind"]) == (2, "version")
    assert "0.5.13" in result["error"]["message"]
    done = by_hand(version, package("0.5.13"))
    assert done.returncode == 1
    assert "for 0.5.13 there is nothing" in done.stderr
    assert engine.files() == before == {k: v for k, v in contents(tmp_path / "site/sglang").items() if k in before}


@pytest.mark.parametrize(("version", "engine_version"), [("v4", "0.5.14"), ("v5", "0.5.12")])
def test_each_refuses_the_others_engines(package, version, engine_version):
    """And names the patch that is for them."""
    folder = package(engine_version)
    before = contents(folder)
    done = by_hand(version, folder)
    assert done.returncode == 1
    assert {"v4": "there is v5", "v5": "there is v4"}[version] in done.stderr
    assert contents(folder) == before


@pytest.mark.parametrize(("version", "engine_version"), [("v4", "0.5.12"), ("v5", "0.5.14")])
class TestByHand:
    """The scripts run on a folder without deployctl."""

    def test_twice_is_once(self, package, version, engine_version):
        """The second run writes nothing, not even the same bytes; modes stay; no temporary files are left."""
        folder = package(engine_version)
        target = folder / "srt/server_args.py"
        target.chmod(0o640)
        names = set(contents(folder))
        assert by_hand(version, folder).returncode == 0
        assert target.stat().st_mode & 0o777 == 0o640
        made = set(contents(folder)) - names
        assert all(name.startswith("srt/speculative/dynspec") for name in made)
        assert all((folder / name).stat().st_mode & 0o777 == 0o644 for name in made)
        times = {name: (folder / name).stat().st_mtime_ns for name in contents(folder)}
        again = by_hand(version, folder)
        assert again.returncode == 0
        assert {"already patched"} == {line.partition(": ")[2] for line in again.stdout.splitlines()}
        assert times == {name: (folder / name).stat().st_mtime_ns for name in contents(folder)}

    def test_an_edit_in_our_block_is_refused_with_the_difference(self, package, version, engine_version):
        """What a user changed in what the patch brought is shown, and stays."""
        folder = package(engine_version)
        assert by_hand(version, folder).returncode == 0
        target = folder / "srt/server_args.py"
        edited = target.read_text().replace("Do not speculate while", "Never speculate while")
        target.write_text(edited)
        done = by_hand(version, folder)
        assert done.returncode == 1
        assert re.search(r"^-.*Do not speculate while", done.stderr, re.MULTILINE)
        assert re.search(r"^\+.*Never speculate while", done.stderr, re.MULTILINE)
        assert target.read_text() == edited

    def test_another_revision_of_the_patch_is_replaced(self, package, version, engine_version):
        """A block that is as some revision wrote it, but not as this one would, gives way."""
        folder = package(engine_version)
        assert by_hand(version, folder).returncode == 0
        wanted = contents(folder)
        target = folder / "srt/server_args.py"
        text = target.read_text()
        block = re.search(rf"^ *# >>> dynamic_spec/{version} (\w+)\n(.*?)^ *# <<<", text, re.DOTALL | re.MULTILINE)
        sys.path.insert(0, str(PROJECT / "patches/dynamic_spec/src"))
        import editing

        older = block[2].replace("Optional[int]", "Optional[float]")
        target.write_text(text.replace(block[2], older).replace(block[1], editing._short_hash(older), 1))
        assert by_hand(version, folder).returncode == 0
        assert contents(folder) == wanted

    def test_edits_elsewhere_in_a_file_are_kept(self, package, version, engine_version):
        """Another series below, or a line of the user's, where the patch relies on nothing."""
        folder = package(engine_version)
        target = folder / "srt/server_args.py"
        target.write_text("# mine\n# >>> other_series/v1 0\n# <<< other_series/v1\n" + target.read_text())
        assert by_hand(version, folder).returncode == 0
        assert target.read_text().startswith("# mine\n# >>> other_series/v1 0\n")

    def test_nothing_is_written_where_a_file_cannot_be(self, package, version, engine_version):
        """All files or none: what was written before the fault is put back."""
        folder = package(engine_version)
        before = contents(folder)
        # A folder that cannot be made: its name is a dangling link. v5's module is taken by a folder.
        if version == "v4":
            (folder / "srt/speculative/dynspec").symlink_to("/nonexistent/place")
        else:
            shutil.copytree(folder / "srt/speculative", folder / "srt/speculative/dynspec_config.py")
            before = contents(folder)
        done = by_hand(version, folder)
        assert done.returncode == 1
        assert contents(folder) == before


def test_v4_refuses_an_edited_method(package):
    """A change in what the patch wraps is named with its line; one in a neighbour is not our business."""
    folder = package("0.5.12")
    worker = folder / WORKER
    text = worker.read_text()
    neighbour = text.replace(
        "    def init_cuda_graphs(self):\n", "    def init_cuda_graphs(self):\n        print('mine')\n"
    )
    assert neighbour != text
    worker.write_text(neighbour)
    assert by_hand("v4", folder).returncode == 0
    worker.write_text(text.replace("    def draft(self, batch: ScheduleBatch):\n", "    def draft(self, batch):\n"))
    done = by_hand("v4", folder)
    assert done.returncode == 1
    assert re.search(r"eagle_worker\.py:\d+ EAGLEWorker\.draft is not as in any release known here", done.stderr)


def test_v4_refuses_an_edited_dependency(package):
    """Also in files it does not write: what it relies on there must be as it was when it was written."""
    folder = package("0.5.12")
    info = folder / "srt/speculative/eagle_info.py"
    info.write_text(info.read_text().replace("    def prepare_for_verify(self,", "    def prepare_for_verify2(self,"))
    before = contents(folder)
    done = by_hand("v4", folder)
    assert done.returncode == 1
    assert "eagle_info.py: no EagleVerifyInput.prepare_for_verify" in done.stderr
    assert contents(folder) == before


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_history_and_v4_refuse_each_other_by_hand(package, version):
    """Under deployctl one replaces the other; by hand the first must be taken back."""
    folder = package("0.5.12")
    assert by_hand(version, folder).returncode == 0
    done = by_hand("v4", folder)
    assert done.returncode == 1
    assert f"patched already by dynamic_spec/{version}: roll back first" in done.stderr
    shutil.rmtree(folder)
    folder = package("0.5.12")
    assert by_hand("v4", folder).returncode == 0
    done = by_hand(version, folder)
    assert done.returncode == 1
    assert "patched already by dynamic_spec/v4" in done.stderr


def test_a_file_of_that_name_is_not_overwritten(package):
    """Somebody else's module where ours would go."""
    folder = package("0.5.12")
    module = folder / "srt/speculative/dynspec/policy.py"
    module.parent.mkdir()
    module.write_text("theirs = 1\n")
    done = by_hand("v4", folder)
    assert done.returncode == 1
    assert "srt/speculative/dynspec/policy.py is there already, and not from this patch" in done.stderr
    assert module.read_text() == "theirs = 1\n"


def test_a_cut_block_is_refused(package):
    """A mark without its end: nothing can be told apart any more."""
    folder = package("0.5.12")
    assert by_hand("v4", folder).returncode == 0
    worker = folder / WORKER
    worker.write_text(worker.read_text().replace("# <<< dynamic_spec/v4\n", ""))
    done = by_hand("v4", folder)
    assert done.returncode == 1
    assert "has no end" in done.stderr


def test_the_installed_package_is_found_without_importing_it(installed):
    """By hand without an argument: the package of the interpreter. Importing it would fail here: there is no torch."""
    python, folder = installed("0.5.9")
    before = contents(folder)
    script = PROJECT / "patches" / "dynamic_spec" / "v4.py"
    env = {name: value for name, value in os.environ.items() if name != "DEPLOYCTL_PACKAGE_DIR"}
    try:
        done = subprocess.run([python, script], capture_output=True, text=True, check=False, env=env, cwd="/")
        assert (done.returncode, done.stderr) == (0, "")
        assert "dynspec" in (folder / WORKER).read_text()
    finally:
        for path in set(contents(folder)) - set(before):
            (folder / path).unlink()
        for path, content in before.items():
            (folder / path).write_bytes(content)
        (folder / "srt/speculative/dynspec").rmdir()


def test_v4_imports_through_the_pipeline(tmp_path, package, engine_python):
    """The whole push, imports included, on the engine's environment on the CPU; the imported files are the patched ones."""
    folder = package("0.5.12")
    distribution = next(engine_python.parents[1].glob("lib/python*/site-packages/sglang-0.5.12.dist-info"))
    shutil.copytree(distribution, folder.parent / distribution.name)
    env = {"PYTHONPATH": str(folder.parent), "SGLANG_USE_CPU_ENGINE": "1"}
    engine = Engine(tmp_path, engine_python, folder, env)
    result = engine.push("v4", imports=True)
    assert result["status"] == "pushed", result["error"]
    wanted = json.loads(json.dumps(patches.load("dynamic_spec/v4", PROJECT).metadata.verify))
    assert wanted == [module["module"] if isinstance(module, dict) else module for module in result["verified"]]
    assert engine.rollback()["status"] == "rolled_back"
