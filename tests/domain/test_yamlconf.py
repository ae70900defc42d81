"""Strict YAML: nothing is guessed, and every error names its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl import yamlconf
from deployctl.errors import ConfigError


def value(text: str) -> yamlconf.Value:
    return yamlconf.parse(text.encode(), "f.yaml")


def message(act) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        act()
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "f.yaml:2 a: duplicate key (first on line 1)"),
        ("a:\n  b: 1\n  b: 2\n", "f.yaml:3 a.b: duplicate key (first on line 2)"),
        ("a: &x {b: 1}\n<<: *x\n", "f.yaml:2 <<: merge keys (<<) are not supported"),
        ("a: !!python/name:os.system x\n", "f.yaml:1 a: tag tag:yaml.org,2002:python/name:os.system is not supported"),
        ("a: !local x\n", "f.yaml:1 a: tag !local is not supported"),
        ("? [1, 2]\n: x\n", "f.yaml:1 keys must be plain words"),
        ("a: [1, 2\n", "f.yaml:2 not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("\ta: 1\n", "f.yaml:1 not valid YAML: found character that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2 not valid YAML: but found another document"),
        ("a: \x07\n", "f.yaml:1 not valid YAML: control characters are not allowed"),
    ],
)
def test_what_is_refused_at_reading(text, expected):
    """Duplicates, merges, tags, broken YAML: file, line and key path."""
    assert message(lambda: value(text))[0].startswith(expected.split(":", 2)[0] + ":")
    assert message(lambda: value(text))[0] == expected or "not valid YAML" in expected


def test_bytes_that_are_no_text():
    """Not UTF-8: the line is named."""
    assert message(lambda: yamlconf.parse(b"a: 1\nb: \xff\n", "f"))[0] == "f:2 not UTF-8 text"


def test_a_file_that_is_not_there(tmp_path):
    """The reason stands in the error."""
    assert "No such file" in message(lambda: yamlconf.load(tmp_path / "x.yaml"))[0]


def test_byte_order_mark_and_crlf_are_accepted(tmp_path):
    """Files from other systems read the same."""
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: x\r\nb: [u, z]\r\n")
    fields = yamlconf.load(path).mapping()
    assert (fields["a"].text(), fields["b"].texts()) == ("x", ("u", "z"))


def test_alias_bombs_are_bounded():
    """Aliases that expand without end are refused, not expanded."""
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(6)
    )
    assert "expand without end" in message(lambda: value(text))[0]
    assert "expand without end" in message(lambda: value("a: &a [*a]\n"))[0]


@pytest.mark.parametrize("word", ["no", "Yes", "on", "off", "true", "022", "12:30:45", "0x1f", "~", "null"])
def test_words_that_yaml_reads_otherwise_need_quotes(word):
    """What YAML 1.1 turns into a boolean, an octal or a base-60 number is not taken for text."""
    said, hint = message(lambda: value(f"a: {word}\n").mapping()["a"].text())
    assert said == f"f.yaml:1 a: {word} is not text to YAML"
    assert hint == f"write it in quotes: a: {word!r}"
    assert value(f"a: '{word}'\n").mapping()["a"].text() == word


def test_arguments_keep_numbers_as_written():
    """A command argument is the text that stands there."""
    fields = value("a: 0.10\nb: 30000\nc: no\nd: true\n").mapping()
    assert fields["a"].scalar_text() == "0.10"
    assert fields["d"].scalar_text() == "true"
    assert message(fields["c"].scalar_text)[0] == "f.yaml:1 c: no is not text to YAML".replace(":1", ":3")


@pytest.mark.parametrize(
    ("text", "read", "expected"),
    [
        ("a: {}", lambda v: v.text(), "f.yaml:1 a: should be text, not a mapping"),
        ("a: []", lambda v: v.mapping(), "f.yaml:1 a: should be a mapping (key: value), not a list"),
        ("a: x", lambda v: v.mapping(), "f.yaml:1 a: should be a mapping (key: value), not 'x'"),
        ("a: x", lambda v: v.sequence(), "f.yaml:1 a: should be a list ([a, b]), not 'x'"),
        ("a: ''", lambda v: v.text(), "f.yaml:1 a: is empty"),
        ("a: yes", lambda v: v.boolean(), "f.yaml:1 a: should be true or false, not 'yes'"),
        ("a: '1'", lambda v: v.integer(), "f.yaml:1 a: should be a whole number, not '1'"),
        ("a: 1.5", lambda v: v.integer(), "f.yaml:1 a: should be a whole number, not '1.5'"),
        ("a: 0", lambda v: v.integer(least=1), "f.yaml:1 a: should be at least 1, not 0"),
        ("a: 9", lambda v: v.integer(least=1, most=8), "f.yaml:1 a: should be from 1 to 8, not 9"),
        ("a: soon", lambda v: v.duration_s(), "f.yaml:1 a: should be a duration such as 30s or 15m, not 'soon'"),
        ("a: 0s", lambda v: v.duration_s(), "f.yaml:1 a: should be more than 0 and at most 30d, not 0s"),
        ("a: 31d", lambda v: v.duration_s(), "f.yaml:1 a: should be more than 0 and at most 30d, not 31d"),
    ],
)
def test_wrong_types(text, read, expected):
    """Each accessor says what it wants and what it found."""
    assert message(lambda: read(value(text).mapping()["a"]))[0] == expected


def test_unknown_keys_offer_the_nearest():
    """A slip of the finger is answered with the key that was meant."""
    said, hint = message(lambda: value("a:\n  prot: 22\n").mapping()["a"].fields("port", "user"))
    assert (said, hint) == ("f.yaml:2 a.prot: unknown key", "did you mean 'port'?")
    assert message(lambda: value("zzz: 1").fields("port", "user"))[1] == "known here: port, user"


def test_durations_and_empty_values():
    """Seconds from the usual spellings; an empty value is an empty mapping or list."""
    fields = value("a: 90\nb: 90s\nc: 15m\nd: 1.5h\ne: 250ms\nf: 1d\ng:\nh: ~\n").mapping()
    assert [fields[key].duration_s() for key in "abcdef"] == [90, 90, 900, 5400, 0.25, 86400]
    assert fields["g"].mapping() == {}
    assert fields["h"].sequence() == []
    assert fields["a"].integer() == 90
    assert value("x: true").mapping()["x"].boolean() is True
    assert yamlconf.parse(b"", "f").is_null


def test_plain_data():
    """`json` reads what JSON would read."""
    text = "a: [1, -2, 1.5, true, false, ~, x, '7']\nb: {c: 1e3}\n"
    assert value(text).json() == {"a": [1, -2, 1.5, True, False, None, "x", "7"], "b": {"c": 1000.0}}


@given(st.text(max_size=200))
def test_any_text_is_a_value_or_a_config_error(text):
    """No input raises anything else."""
    try:
        yamlconf.parse(text.encode("utf-8", "surrogatepass"), "f").json()
    except ConfigError as error:
        assert error.message.startswith("f:")
