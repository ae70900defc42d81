#!/usr/bin/env python3
"""Generates the patch scripts that carry more than edits, because a host is sent one file.

    python tools/build_patches.py                   write patches/dynamic_spec/v4.py and v5.py
    python tools/build_patches.py --check           exit 1 where they are not what the sources make
    python tools/build_patches.py --learn FOLDER    first read the engine's wheels in FOLDER into known.json again:
                                                    the files and functions that the patches' guards know

Lines of a source that end in `# build: ...` are replaced:

    include FILE            the text of FILE, without its docstring, in place of an import of it
    embed known.json KEY    that part of it, as a dict
    embed modules FOLDER    {path: text} of the modules in it, as a dict
    embed file FILE         the text of FILE
    list targets            what the script may change: the files that its guard knows of, and its own
"""

import argparse
import ast
import csv
import io
import json
import re
import sys
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SERIES = PROJECT / "patches" / "dynamic_spec"
SOURCES = SERIES / "src"
GENERATED = ("v4", "v5")
_LINE = re.compile(r"^(?P<code>.*?)(?:  )?# build: (?P<what>.+)$", re.MULTILINE)

# What each patch edits, and what it wraps or relies on. An empty list: only the anchors matter.
RELIES_ON = {
    "v4": {
        "srt/server_args.py": [],
        "srt/speculative/eagle_worker.py": [
            "EAGLEWorker.__init__",
            "EAGLEWorker.draft",
            "EAGLEWorker.forward_batch_generation",
            "EAGLEWorker.forward_draft_extend_after_decode",
            "EAGLEWorker.verify",
        ],
        "srt/speculative/eagle_worker_v2.py": [
            "EAGLEWorkerV2.__init__",
            "EAGLEWorkerV2.forward_batch_generation",
            "EAGLEWorkerV2.verify",
            "EagleDraftWorker._draft_extend_for_decode",
            "EagleDraftWorker.draft",
        ],
        "srt/speculative/eagle_info.py": [
            "EagleDraftInput.filter_batch",
            "EagleDraftInput.merge_batch",
            "EagleVerifyInput.prepare_for_verify",
            "EagleVerifyInput.verify",
        ],
        "srt/managers/schedule_batch.py": ["ScheduleBatch.filter_batch", "ScheduleBatch.maybe_wait_verify_done"],
        "srt/speculative/eagle_info_v2.py": [
            "EagleDraftInputV2Mixin.prepare_for_decode",
            "EagleVerifyInputV2Mixin.prepare_for_v2_verify",
            "EagleVerifyInputV2Mixin.sample",
        ],
        "srt/speculative/draft_utils.py": ["DraftBackendFactory.create_draft_extend_backend"],
        "srt/speculative/eagle_draft_extend_cuda_graph_runner.py": ["EAGLEDraftExtendCudaGraphRunner.__init__"],
        "srt/model_executor/cuda_graph_runner.py": ["CudaGraphRunner.__init__", "get_batch_sizes_to_capture"],
        "srt/layers/attention/triton_backend.py": [
            "TritonAttnBackend.forward_decode",
            "TritonAttnBackend.init_forward_metadata",
            "TritonAttnBackend.init_forward_metadata_capture_cuda_graph",
            "TritonAttnBackend.init_forward_metadata_replay_cuda_graph",
        ],
    },
    "v5": {
        "srt/server_args.py": [],
        "srt/arg_groups/fields/spec.py": [],
        "srt/arg_groups/speculative_hook.py": ["_init_adaptive_speculative_params", "_maybe_disable_adaptive"],
        "srt/speculative/adaptive_spec_params.py": [
            "AdaptiveSpeculativeParams.__init__",
            "AdaptiveSpeculativeParams._find_closest_bs",
            "adaptive_unsupported_reason",
        ],
    },
}
VERSIONS = {"v4": ((0, 5, 9), (0, 5, 12)), "v5": ((0, 5, 14), (0, 5, 23))}


def learn(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Of all wheels in `folder`: {patch: {file: {"files": [hashes], "functions": {name: [hashes]}}}}."""
    sys.path.insert(0, str(SOURCES))
    import editing

    known: dict[str, dict[str, dict[str, object]]] = {}
    for patch, relied_on in RELIES_ON.items():
        low, high = VERSIONS[patch]
        for relative, functions in relied_on.items():
            files: set[str] = set()
            hashes: dict[str, set[str]] = {name: set() for name in functions}
            for wheel in sorted(folder.glob("sglang-*.whl")):
                version = tuple(int(part) for part in wheel.name.split("-")[1].split(".")[:3])
                if not low <= version <= high:
                    continue
                with zipfile.ZipFile(wheel) as unpacked:
                    name = f"sglang/{relative}"
                    if name not in unpacked.namelist():
                        continue  # fields/spec.py came with a late version
                    files.add(_record(unpacked)[name].removeprefix("sha256="))
                    if functions:
                        found = editing.definitions(unpacked.read(name).decode("utf-8"))
                for function in functions:
                    hashes[function].add(found[function][0])
            known.setdefault(patch, {})[relative] = {
                "files": sorted(files),
                "functions": {name: sorted(values) for name, values in sorted(hashes.items())},
            }
    return known


def _record(wheel: zipfile.ZipFile) -> dict[str, str]:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
    return {row[0]: row[1] for row in csv.reader(io.StringIO(wheel.read(name).decode("utf-8"))) if len(row) > 1}


def generate(patch: str) -> str:
    """The text of a generated script."""
    source = (SOURCES / f"{patch}.py").read_text(encoding="utf-8")
    text = _LINE.sub(lambda line: _built(line["code"], line["what"].split(), patch), source)
    text = re.sub(r"\n{3,}(?=[^\n])", "\n\n\n", text)
    ast.parse(text)
    fence = text.index("# ///\n") + len("# ///\n")
    note = "# Generated by tools/build_patches.py from patches/dynamic_spec/src: edit there.\n"
    return text[:fence] + note + text[fence:]


def _built(code: str, what: list[str], patch: str) -> str:
    match what:
        case ["include", name]:
            return _without_docstring((SOURCES / name).read_text(encoding="utf-8"))
        case ["embed", "known.json", key]:
            known = json.loads((SOURCES / "known.json").read_text(encoding="utf-8"))
            return f"{code.partition('=')[0]}= {_literal(known[key])}"
        case ["embed", "modules", folder]:
            return f"{code.partition('=')[0]}= {{\n{''.join(_entry(path) for path in _modules(folder))}}}"
        case ["embed", "file", name]:
            return f"{code.partition('=')[0]}= {_quoted(SOURCES / name)}"
        case ["list", "targets"]:
            targets = [path for path in RELIES_ON[patch] if path in _edited()]
            targets += [f"srt/speculative/{path.relative_to(SOURCES)}" for path in _modules("dynspec")]
            listed = ",\n#   ".join(json.dumps(target) for target in targets)
            return f"# targets = [\n#   {listed},\n# ]"
    raise SystemExit(f"{patch}.py: unknown instruction: {' '.join(what)}")


def _edited() -> tuple[str, ...]:
    return ("srt/server_args.py", "srt/speculative/eagle_worker.py", "srt/speculative/eagle_worker_v2.py")


def _modules(folder: str) -> list[Path]:
    return sorted((SOURCES / folder).glob("*.py"))


def _entry(path: Path) -> str:
    return f"    {json.dumps(str(path.relative_to(SOURCES)))}: {_quoted(path)},\n"


def _quoted(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if "'''" in text or text.endswith("'"):
        raise SystemExit(f"{path}: holds ''' and cannot be quoted")
    return f"r'''\n{text}'''"


def _literal(value: object) -> str:
    """JSON of objects, lists and texts is a Python literal too; trailing commas as a formatter would have them."""
    return re.sub(r'(["\]}])\n', r"\1,\n", json.dumps(value, indent=4))


def _without_docstring(text: str) -> str:
    first = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[first.end_lineno :]).strip("\n") + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Generate the patch scripts of patches/dynamic_spec.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    parser.add_argument("--learn", type=Path, metavar="FOLDER", help="read the wheels in FOLDER into known.json first")
    arguments = parser.parse_args()
    if arguments.learn:
        text = json.dumps(learn(arguments.learn), indent=1) + "\n"
        (SOURCES / "known.json").write_text(text, encoding="utf-8")
    old = []
    for patch in GENERATED:
        path = SERIES / f"{patch}.py"
        text = generate(patch)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(patch)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    if arguments.check and old:
        sys.exit(f"not as their sources make them: {', '.join(old)}; run tools/build_patches.py")


if __name__ == "__main__":
    main()
