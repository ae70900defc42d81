"""Everything that is known of attempts and of the releases that they ran, in one answer: what compare and report read.

Nothing is measured here and nothing changes. A record that cannot be read is named under `problems`; the others are
told all the same.
"""

import datetime as dt
import difflib
import os
import re

from . import attempts, gpu, lock, objects, package, releases, site
from .failure import EXIT_NEEDS_RECOVERY, EXIT_USAGE, Failure

_DIFF_CHARACTERS = 60000
_SPEC = tuple("attempt log_tag profile engine release base patches at by argv env port rank nodes log".split())
HIDDEN = "***"
# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY; but neither TOKENIZERS_PARALLELISM nor MAX_TOKENS=4096.
_SECRET_NAME = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_COUNT_NAME = re.compile(r"TOKENS$", re.IGNORECASE)
# --api-key, --hf-token, --ssl-keyfile-password; but neither --ssl-keyfile, a path, nor --max-total-tokens.
_SECRET_OPTION = re.compile(r"--?(?:[\w-]*[-_])?(?:key|token|secret|password)", re.IGNORECASE)


def dossier(context):
    """Attempts with their releases, phases, verdicts and benches.

    Arguments of the operation: `attempts`, a list of {"attempt": n}, {"log_tag": t} or {"name": n or t}, or None for
    all; `contents`, whether the files that their releases change come along; `paths`, further files wanted then.

    Returns:
        {"status", "host", "package", "version", "gpus", "releases", "attempts", "contents", "problems"}. Attempts come
        in the order asked for, or oldest first. `contents` is {tree: {path: text or None}}; `tree` of an attempt or a
        release names its key: the number of a release, `0@b` for the pristine package of base b.

    Raises:
        Failure: No such attempt (exit 2), naming those nearest to it; or damaged state (exit 8).
    """
    busy = lock.reading(context)
    problems: list = []
    wanted = context.args.get("attempts")
    known = _readable(attempts.numbers(context.state), lambda number: _load(context.state, number), problems)
    chosen = known if wanted is None else [_chosen(known, entry, problems) for entry in wanted]
    trees = _trees(context.state, None if wanted is None else chosen, problems)
    now = releases.pointer(context.state)
    version = _version(context.state, now["base"]) or _installed(context, problems)
    described = _readable(chosen, lambda attempt: _attempt(context, attempt, version, problems), problems)
    if wanted is not None and len(described) < len(chosen):
        raise Failure(
            "; ".join(problems), kind="state-damaged", hint="deployctl history", exit_code=EXIT_NEEDS_RECOVERY
        )
    tools: dict = {}
    result = {
        "status": "ok",
        "host": context.host.get("name"),
        "package": context.host.get("package") or "sglang",
        "version": version,
        "release": now["release"],
        "gpus": [{"name": card["name"], "memory_total_mib": card["total_mib"]} for card in gpu.cards(context, tools)],
        "releases": _readable(trees, lambda release: _release(context.state, release, now), problems),
        "attempts": described,
        "problems": problems,
        "push_in_progress": busy,
    }
    if context.args.get("contents"):
        result["contents"] = _contents(context.state, trees, context.args.get("paths") or [])
    return result


def _readable(keys, read, problems):
    """What can be read of several records, each by itself; a damaged one becomes a line of `problems`."""
    found = []
    for key in keys:
        try:
            found.append(read(key))
        except (Failure, KeyError, TypeError, ValueError, OSError) as error:
            problems.append(getattr(error, "message", None) or "%s: %s" % (type(error).__name__, error))
    return [entry for entry in found if entry is not None]


def _version(state, base):
    return releases.base_of(state, base)["version"] if base is not None else None


def _installed(context, problems):
    """The package's version where nothing was ever pushed; None where there is no package."""
    try:
        return package.locate(context).version
    except Failure as failure:
        problems.append(failure.message)
        return None


# -- which attempts ------------------------------------------------------------------------------------------------


def _load(state, number):
    """One attempt, with everything that is told of it."""
    attempt = attempts.load(state, number)
    missing = [key for key in _SPEC if key not in attempt] if attempt else []
    if missing:
        raise state.damaged("it does not hold %s" % ", ".join(missing), "attempts", number, "spec.json")
    return attempt


def _chosen(known, entry, problems):
    """The attempt that an entry of `attempts` means; a name of digits is a number before it is a tag.

    Raises:
        Failure: There is none, naming the nearest.
    """
    name = str(entry.get("name", entry.get("attempt", entry.get("log_tag"))))
    by_number = [attempt for attempt in known if str(attempt["attempt"]) == name] if "log_tag" not in entry else []
    by_tag = [attempt for attempt in known if attempt["log_tag"] == name] if "attempt" not in entry else []
    found = by_number or by_tag
    if found:
        return found[-1]
    tags = list(dict.fromkeys(attempt["log_tag"] for attempt in reversed(known)))
    near = difflib.get_close_matches(name, tags, n=3, cutoff=0.5)
    if near:
        hint = "did you mean %s? deployctl history lists all" % " or ".join(near)
    elif known:
        hint = "attempts: %s" % ", ".join("%d (%s)" % (one["attempt"], one["log_tag"]) for one in known[-10:])
    else:
        hint = "nothing was launched here yet: deployctl launch --log-tag TAG"
    raise Failure(
        "; ".join(["there is no attempt %s on this host" % name, *problems]),
        kind="unknown-attempt",
        hint=hint,
        exit_code=EXIT_USAGE,
    )


def _tree_of(state, attempt):
    """(key of `contents`, base) of what an attempt ran; None where no base was ever stored.

    What was launched before the first push ran the package that the first push then took as its base.
    """
    if attempt["release"]:
        return str(attempt["release"]), attempt["base"]
    base = attempt["base"] if attempt["base"] is not None else min(_bases(state), default=None)
    return (None, None) if base is None else ("0@%d" % base, base)


def _attempt(context, attempt, version, problems):
    problems += attempt.get("damaged") or []
    verdict = attempt["verdict"] or {}
    ended = (attempt["exit"] or {}).get("at") or (verdict.get("stopping") or {}).get("at")
    state = attempts.state_of(attempt)
    tree, base = _tree_of(context.state, attempt)
    return {
        "attempt": attempt["attempt"],
        "log_tag": attempt["log_tag"],
        "profile": attempt["profile"],
        "engine": attempt["engine"],
        "release": attempt["release"],
        "base": base,
        "tree": tree,
        "version": version if base is None else _version(context.state, base),
        "patches": attempt["patches"],
        "at": _iso(attempt["at"]),
        "by": attempt["by"],
        "argv": hidden_options(attempt["argv"]),
        "env": hidden_variables(attempt["env"]),
        "state": state,
        "phases": verdict.get("phases") or [],
        "ready_seconds": verdict.get("ready_seconds"),
        "smoke": verdict.get("smoke"),
        "crash": verdict.get("crash"),
        "ended": _iso(ended) if ended and state in attempts.FINAL else None,
        "port": attempt["port"],
        "rank": attempt["rank"],
        "nodes": attempt["nodes"],
        "log": attempt["log"],
        "benches": _benches(context.state, attempt["attempt"], problems),
    }


def _benches(state, number, problems):
    """The records of an attempt's benches, oldest first."""
    try:
        names = os.listdir(state.path("attempts", number, "bench"))
    except OSError:
        return []
    order = sorted(int(name) for name in names if name.isdigit())
    return _readable(order, lambda bench: state.read_json("attempts", number, "bench", bench, "bench.json"), problems)


def _iso(at):
    stamp = dt.datetime.fromtimestamp(at, dt.timezone.utc)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def hidden_variables(env):
    """Environment variables with the values of secrets hidden."""
    return {name: HIDDEN if _is_secret(name, value) else value for name, value in env.items()}


def _is_secret(name, value):
    if _COUNT_NAME.search(name) and str(value).isdigit():
        return False
    return _SECRET_NAME.search(name) is not None


def hidden_options(argv):
    """A command line with the values of secret options hidden."""
    shown = []
    hide = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = _SECRET_OPTION.fullmatch(option) is not None
        shown.append(HIDDEN if hide else option + equals + HIDDEN if secret and equals else word)
        hide = secret and not equals and not hide
    return shown


# -- releases ------------------------------------------------------------------------------------------------------


def _bases(state):
    """All numbers of bases, ascending."""
    try:
        names = os.listdir(state.path("bases"))
    except OSError:
        return []
    return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())


def _trees(state, chosen, problems):
    """The releases that `chosen` attempts ran with their bases, or all; each base before its releases."""
    everything = _readable(_bases(state), lambda base: releases.load(state, 0, base), problems)
    everything += _readable(releases.numbers(state), lambda number: releases.load(state, number), problems)
    everything.sort(key=lambda release: (release["base"], release["number"]))
    if chosen is None:
        return everything
    keys = {_tree_of(state, attempt) for attempt in chosen}
    bases = {base for _, base in keys}
    names = {key for key, _ in keys}
    return [one for one in everything if _key(one) in names or (one["number"] == 0 and one["base"] in bases)]


def _key(release):
    return str(release["number"]) if release["number"] else "0@%d" % release["base"]


def _release(state, release, now):
    base = releases.base_of(state, release["base"])["files"]
    parent = _parent(state, release)
    diff = site.unified(_changes(state, parent, release))
    return {
        "number": release["number"],
        "tree": _key(release),
        "base": release["base"],
        "version": release["version"],
        "parent": release["parent"],
        "at": _iso(release["at"]),
        "by": release["by"],
        "command": release["command"],
        "current": (release["number"], release["base"]) == (now["release"], now["base"]),
        "patches": releases.references(release),
        "files": [
            {"path": path, "before": base[path][0] if path in base else None, "after": change["sha"]}
            for path, change in sorted(release["files"].items())
        ],
        "diff": _whole_lines(diff),
        "diff_truncated": len(diff) > _DIFF_CHARACTERS,
    }


def _parent(state, release):
    """The release that this one was pushed onto; its base where that belongs to another install, or is gone."""
    if release["parent"]:
        try:
            parent = releases.load(state, release["parent"])
        except Failure:
            parent = None
        if parent is not None and parent["base"] == release["base"]:
            return parent
    return releases.load(state, 0, release["base"])


def _changes(state, before, after):
    """[(path, bytes or None, bytes or None)] of the files in which two releases of one base differ."""
    old, new = releases.expected(state, before), releases.expected(state, after)
    found = []
    for path in sorted({*before["files"], *after["files"]}):
        pair = [_content(state, entries, path) for entries in (old, new)]
        if pair[0] != pair[1]:
            found.append((path, *pair))
    return found


def _content(state, entries, path):
    return objects.read(state, entries[path].sha) if path in entries else None


def _whole_lines(diff):
    if len(diff) <= _DIFF_CHARACTERS:
        return diff
    return diff[: diff.rfind("\n", 0, _DIFF_CHARACTERS) + 1]


def _contents(state, trees, paths):
    """{tree: {path: text or None}} of every file that any of the releases changes, and of `paths`."""
    wanted = sorted({path for release in trees for path in release["files"]} | set(paths))
    found = {}
    for release in trees:
        entries = releases.expected(state, release)
        contents = {path: _content(state, entries, path) for path in wanted}
        found[_key(release)] = {
            path: content.decode("utf-8", "backslashreplace") if content is not None else None
            for path, content in contents.items()
        }
    return found
