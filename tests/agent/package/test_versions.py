"""Versions are judged as `packaging` judges them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from deployctl.agent import versions
from deployctl.agent.failure import Failure

NUMBER = st.integers(0, 3).map(str)


def maybe(strategy):
    return st.one_of(st.just(""), strategy)


def joined(*strategies):
    return st.tuples(*strategies).map("".join)


VERSION = joined(
    maybe(st.sampled_from(["v", "1!", "0!"])),
    st.lists(NUMBER, min_size=1, max_size=4).map(".".join),
    maybe(joined(st.sampled_from(["a", "b", "rc", ".alpha", "-beta_", "c", "pre", "_preview.", "x"]), maybe(NUMBER))),
    maybe(joined(st.sampled_from([".post", "-", "rev", ".r", "post"]), NUMBER)),
    maybe(joined(st.sampled_from([".dev", "dev", "-dev"]), maybe(NUMBER))),
    maybe(st.sampled_from(["+cu128", "+1", "+1.a", "+a.1", "+ubuntu-1", "+CU128", "+01", "+"])),
)
OPERATOR = st.sampled_from(["==", "!=", "<", ">", "<=", ">=", "~=", "===", "=", "=>", ""])
SPECIFIER = joined(maybe(st.just(" ")), OPERATOR, maybe(st.just(" ")), VERSION, maybe(st.sampled_from([".*", "*"])))


def by_packaging(version, specifiers):
    try:
        Version(version)
        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return "bad"


def by_us(version, specifiers):
    try:
        return versions.satisfies(version, specifiers)
    except Failure as failure:
        assert (failure.kind, failure.exit_code) == ("bad-version", 2)
        return "bad"


@settings(max_examples=800, deadline=None)
@given(VERSION, st.lists(SPECIFIER, max_size=2).map(",".join))
@example("0.5.9.post1", ">0.5.9")
@example("0.5.9rc1", "<0.5.9")
@example("0.5.9+cu128", "<=0.5.9")
@example("0.5.10", "~=0.5.9")
@example("0.dev", "<0.post0")
@example("1.0.post2.dev1", ">1.0.post1")
@example("1.0.dev2", ">1.0.dev1")
@example("0.6", "!=0.5.*,")
def test_judged_as_packaging_judges(version, specifiers):
    """Any version against any specifiers, nonsense included, gets packaging's answer."""
    assert by_packaging(version, specifiers) == by_us(version, specifiers)


@pytest.mark.parametrize("specifiers", ["==1.0a1.*", "~=1", ">=1.0+local", "<=1.*", "newer", ">= 1 2"])
def test_nonsense_names_itself(specifiers):
    """A specifier of no form is refused by its text, also behind one that does not hold."""
    with pytest.raises(Failure) as caught:
        versions.satisfies("0.1", "==9," + specifiers)
    assert "PEP 440" in caught.value.hint or "version" in caught.value.message
    assert 2 == caught.value.exit_code
