"""rollback and history: where it goes, and what it refuses."""

import pytest
from support import edit, everything, perform, perform_push, threshold


@pytest.fixture
def three(near):
    """Releases a/v1, a/v2 and a/v2 + b/v1, and the trees at each: [base, 1, 2, 3]."""
    trees = [everything(near.package)]
    perform_push(near, "a/v1", threshold(1))
    trees.append(everything(near.package))
    perform_push(near, "a/v2", threshold(2))
    trees.append(everything(near.package))
    perform_push(
        near, "b/v1", edit(["srt/new/n.py"], "(root / 'srt/new').mkdir()\n(root / 'srt/new/n.py').write_text('')\n")
    )
    trees.append(everything(near.package))
    near.trees = trees
    near.tries = 0
    return near


def back(near, to=None, **args) -> dict:
    near.tries += 1
    return perform(near, "rollback", to=to, transaction=f"back{near.tries}", **args)


def test_each_rollback_goes_one_further_back(three):
    """Never forth and back; at the base it says that there is nothing to roll back."""
    for number in (2, 1, 0):
        result = back(three)
        assert ("rolled_back", number, number + 1) == (result["status"], result["release"], result["previous"])
        assert three.trees[number] == everything(three.package)
        assert number == perform(three, "history")["release"]
    result = back(three)
    assert (2, "nothing-to-roll-back") == (result["exit"], result["error"]["kind"])


@pytest.mark.parametrize(
    ("to", "number"),
    [("base", 0), (0, 0), (1, 1), ("2", 2), ("a/v1", 1), ("v1", 3), ("a/v2", 3), ("b/v1", 3), (3, 3)],
)
def test_rollback_finds_its_target(three, to, number):
    """Numbers, `base`, and references (the newest release whose stack holds them); the hashes prove it."""
    result = back(three, to)
    assert ("unchanged" if number == 3 else "rolled_back", number) == (result["status"], result["release"]), result
    assert three.trees[number] == everything(three.package)


@pytest.mark.parametrize(
    ("to", "words"),
    [("nope", "a/v1, a/v2, b/v1"), ("a/v9", "a/v1, a/v2, b/v1"), (7, "0 (base), 1, 2, 3"), (-1, "0 (base), 1, 2, 3")],
)
def test_unknown_targets_are_usage_errors(three, to, words):
    """Exit 2, naming what exists."""
    result = back(three, to)
    assert (2, "unknown-release") == (result["exit"], result["error"]["kind"])
    assert words in result["error"]["hint"]
    assert three.trees[3] == everything(three.package)


def test_a_push_after_a_rollback_is_a_new_release_of_that_one(three):
    """Numbers are not reused, and the release before the new one is the one it was made on."""
    back(three, 1)
    result = perform_push(three, "c/v1", edit(["version.py"], "(root / 'version.py').write_text('V = 1')\n"))
    assert (4, 1, ["a/v1", "c/v1"]) == (result["release"], result["previous"], result["patches"])
    assert 1 == back(three)["release"]


def test_forward_again(three):
    """Rolling to a newer release works like any other target."""
    back(three, "base")
    assert 3 == back(three, 3)["release"]
    assert three.trees[3] == everything(three.package)


def test_nothing_was_ever_pushed(near):
    """Before the first push: `base` is where the host is, everything else is refused; no state is invented."""
    near.tries = 0
    assert "unchanged" == back(near, "base")["status"]
    assert (2, "nothing-to-roll-back") == (back(near)["exit"], back(near)["error"]["kind"])
    assert None is perform(near, "history")["release"]


def test_a_rollback_that_cannot_be_imported_stays(three):
    """Verified as a push is: the old release does not work any more, so the tree stays at the new one."""
    (three.python.parent.parent / "lib").joinpath("x").write_text("")
    result = back(three, 1, imports=["nothing.there"])
    assert ("restored", 1, "import") == (result["status"], result["exit"], result["error"]["kind"])
    assert three.trees[3] == everything(three.package)


def test_a_forced_rollback_to_where_it_is_mends_the_tree(three):
    """An edit is set aside, and the modules of the mended files are imported."""
    (three.package / "srt/args.py").write_text("BY = 'hand'\n")
    result = back(three, 3, force=True)
    assert ("rolled_back", 3, ["fakesgl.srt.args"]) == (result["status"], result["release"], result["verified"])
    assert three.trees[3] == everything(three.package)


def test_outcome_remembers_what_became_of_a_transaction(three):
    """Also of those that later ones have followed, and of rollbacks."""
    assert "rolled_back" == back(three, 1)["status"]
    answers = {
        name: tuple(perform(three, "outcome", transaction=name)[key] for key in ("outcome", "release"))
        for name in ("tx1", "tx3", "back1", "never")
    }
    assert {
        "tx1": ("committed", 1),
        "tx3": ("committed", 3),
        "back1": ("committed", 1),
        "never": ("not-committed", 1),
    } == answers
