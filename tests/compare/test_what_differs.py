"""In what attempts differ: options, settings, phases, files; and the whole as JSON and CSV."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_attempts import attempt, bench, level, sides

from deployctl.agent import unified
from deployctl.domain.comparison import comparison
from deployctl.domain.differences import differences, file_diff, options_of, phases
from deployctl.render import compare as render

PYTHON = ["/env/bin/python", "-m", "sglang.launch_server"]


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_command_line_as_argparse_reads_it():
    """Both ways to give a value, flags, several values, the last of a repeated one, dashes and underscores alike."""
    argv = "--port 1 --tp_size=8 --trust-remote-code --cuda-graph-bs 1 2 4 --port 2 --seed -1 --json {}".split()
    assert (
        tuple(PYTHON),
        {
            "port": "2",
            "tp-size": "8",
            "trust-remote-code": "(set)",
            "cuda-graph-bs": "1 2 4",
            "seed": "-1",
            "json": "{}",
        },
    ) == options_of(PYTHON + argv)
    assert ((), {}) == options_of([])


names = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True).filter(lambda name: not name.startswith("-"))
values = st.text(min_size=1).filter(lambda value: not value.startswith("--"))


@given(st.dictionaries(names, values, max_size=8))
def test_the_order_and_the_form_of_options_make_no_difference(options):
    """`--a b` and `--a=b`, in any order: the same settings."""
    apart = [word for name, value in options.items() for word in (f"--{name}", value)]
    joined = [f"--{name}={value}" for name, value in reversed(options.items())]
    assert options_of(apart)[1] == options_of(joined)[1] == options


# -- settings ----------------------------------------------------------------------------------------------------------


def found(*attempts, **changes):
    return {(one.kind, one.name): one.values for one in differences(sides(*attempts, **changes))}


def test_attempts_that_are_alike_differ_in_nothing():
    """Nothing is listed that is the same on all sides."""
    assert {} == found(attempt(1, "a", bench({1: 1})), attempt(2, "b", bench({1: 2})))


def test_everything_in_which_two_attempts_differ():
    """Patches, profile, arguments and environment, versions and GPUs, and what the servers said of themselves."""
    base = attempt(
        1,
        "a",
        bench({1: 1}, settings={"attention_backend": "fa3", "max_running_requests": 64, "page_size": None}),
        argv=[*PYTHON, "--port", "30000", "--tp-size", "8"],
        env={"A": "1", "B": "2"},
    )
    settings = {"attention_backend": "triton", "max_running_requests": 48, "page_size": 16, "engine_version": "0.5.14"}
    other = attempt(
        2,
        "b",
        bench({1: 1}, settings={**settings, "gpus": ["NVIDIA B200", "NVIDIA B200"]}),
        argv=[*PYTHON, "--port", "30000", "--attention-backend", "triton"],
        env={"B": "3"},
        patches=["x/v1", "y/v2"],
        release=4,
        profile="eagle3-b",
    )
    assert {
        ("run", "host"): ("one", "two"),
        ("run", "GPUs"): ("NVIDIA H200", "2 x NVIDIA B200"),
        ("run", "engine version"): ("0.5.12", "0.5.14"),
        ("run", "patches"): ("base", "x/v1 + y/v2"),
        ("run", "profile"): ("eagle3", "eagle3-b"),
        ("argument", "--tp-size"): ("8", None),
        ("argument", "--attention-backend"): (None, "triton"),
        ("environment", "A"): ("1", None),
        ("environment", "B"): ("2", "3"),
        # Asked for by an argument, so not told twice; page_size is not known of the first.
        ("server", "max_running_requests"): ("64", "48"),
    } == found(base, other, hosts=["one", "two"])


def test_without_a_bench_the_host_tells_what_it_can():
    """Version and GPUs of the host stand in; the servers' own words need a bench of each."""
    assert {("run", "engine version"): ("0.5.12", "0.5.9"), ("run", "nodes"): ("1", "2")} == found(
        attempt(1, "a", bench({1: 1}, settings={"tp_size": 8})), attempt(2, "b", version="0.5.9", nodes=2)
    )


def test_phases_of_all_sides_in_one_order():
    """A phase that only one has is there; so is the whole."""
    other = attempt(
        2, "b", phases=[{"name": "init", "seconds": 4.0}, {"name": "graphs", "seconds": 9.0}], ready_seconds=None
    )
    assert [
        ("init", (3.0, 4.0)),
        ("weights", (60.0, None)),
        ("graphs", (None, 9.0)),
        ("ready", (90.0, None)),
    ] == phases(sides(attempt(1, "a"), other))
    nothing = attempt(1, "a", phases=[], ready_seconds=None)
    assert [] == phases(sides(nothing, nothing | {"attempt": 2}))


# -- files -------------------------------------------------------------------------------------------------------------

texts = st.lists(st.sampled_from(["a\n", "b\n", "\n", "\f\n", "x\ry\n", "c"]), max_size=12).map("".join)


@given(st.dictionaries(st.sampled_from(["p/a.py", "p/b.py", "c.py"]), st.tuples(texts | st.none(), texts | st.none())))
def test_the_diff_makes_the_one_from_the_other(pairs):
    """Applied by the strict reader of patches, it turns the files of the first side into those of the second."""
    before = {path: old for path, (old, _) in pairs.items()}
    after = {path: new for path, (_, new) in pairs.items()}
    diff = file_diff(before, after)
    assert (diff == "") == (before == after)
    patched = dict(before)
    for part in unified.parse(diff.encode()) if diff else []:
        path = (part.new or part.old).partition("/")[2]
        old = before[path]
        new = unified.apply(None if old is None else old.encode(), part, path)
        patched[path] = None if new is None else new.decode()
    # Of an empty file that comes or goes a diff has a header and no hunk.
    assert {path: text or None for path, text in after.items()} == {p: text or None for p, text in patched.items()}


def test_only_files_that_both_sides_tell_of_are_compared():
    """A file that one side was not asked for is no difference."""
    assert "" == file_diff({"a": "1\n"}, {"b": "1\n"})
    assert "+2\n" in file_diff({"a": "1\n"}, {"a": "1\n2\n", "b": "1\n"})


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_the_whole_is_json_and_a_table():
    """Every number of the record is in both; what is not known is null, or an empty field, never 0."""
    two = comparison(
        sides(
            attempt(1, "a", bench([level(1, 100, accept=2.5), level(8, 300, completed=2, problem="14 failed")])),
            attempt(2, "b", bench([level(1, 50), level(4, None)])),
            attempt(3, "c", state="ready"),
            attempt(4, "d", state="stopped", release=7),
        )
    )
    value = json.loads(json.dumps(two.as_json()))
    assert [1, 4, 8] == [row["concurrency"] for row in value["levels"]]
    first, second, third = (row["attempts"] for row in value["levels"])
    assert (100, 1.0, 2.5) == tuple(first["a"][key] for key in ("output_tok_per_s", "ratio", "accept_length"))
    assert (50, 0.5, None) == tuple(first["b"][key] for key in ("output_tok_per_s", "ratio", "accept_length"))
    assert (None, None) == (second["b"]["output_tok_per_s"], second["a"])
    assert (False, None, "14 failed") == tuple(third["a"][key] for key in ("good", "ratio", "problem"))
    assert [None, None] == [first["c"], value["attempts"][2]["bench"]]
    assert first["a"]["itl_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    launch = "deployctl launch --host gpu-1 --profile eagle3 --log-tag d-r1 --replace --bench"
    assert [
        "deployctl bench --host gpu-1 --attempt 3",
        f"deployctl rollback --host gpu-1 --to 7 && {launch}",
    ] == value["next"]
    rows = list(csv.DictReader(io.StringIO(two.as_csv())))
    assert [("a", "1"), ("a", "8"), ("b", "1"), ("b", "4")] == [(row["log_tag"], row["concurrency"]) for row in rows]
    assert ("100", "30.0", "2.5", "1.0", "") == tuple(
        rows[0][key] for key in ("output_tok_per_s", "ttft_ms_p50", "accept_length", "ratio", "itl_ms_p50")
    )
    assert ("2", "", "") == (rows[1]["completed"], rows[1]["ratio"], rows[3]["output_tok_per_s"])


def test_the_whole_as_text():
    """Who is who, failed levels called so, what stands alone said to do so, and the next command to type."""
    value = comparison(
        sides(
            attempt(1, "base", bench({1: 100, 2: 200, 4: 300})),
            attempt(2, "eagle", bench([level(1, 250), level(2, 190), level(4, 1, completed=0, problem="all failed")])),
            attempt(3, "none"),
        )
    ).as_json()
    text = render.lines(value)
    assert "a  base: attempt 1 on gpu-1, base, eagle3, stopped, engine 0.5.12, bench 1" == text[0]
    rows = {line.split()[0]: line.split() for line in text if line[:1].isdigit()}
    assert ["1", "100.0", "250.0*", "-", "2.50x", "-"] == rows["1"][:6]
    assert ["4", "300.0", "failed", "-", "-", "-"] == rows["4"][:6]
    assert "eagle wins at C=1, 2.50x at C=1" in value["headlines"][0].replace("up to", "at")
    assert "only base at C=4" in text
    assert "warning: eagle: C=4 does not count: all failed" in text
    assert "without a bench: none" in text
    (bar,) = [line for line in text if line.startswith("C=2") and "#" in line]
    (longest,) = [line for line in text if line.startswith("C=4") and "#" in line]
    assert round(longest.count("#") * 2 / 3) == bar.count("#")
    assert not any(line.split()[0] == "accept" for line in text if line)


@pytest.mark.parametrize("count", [2, 3, 27])
def test_any_number_of_attempts(count):
    """Two or twenty-seven: a table with a column for each."""
    value = comparison(sides(*(attempt(n, f"t{n}", bench({1: n + 1.0})) for n in range(count)))).as_json()
    text = "\n".join(render.lines(value))
    assert all(f"t{n}: attempt {n} " in text for n in range(count))
