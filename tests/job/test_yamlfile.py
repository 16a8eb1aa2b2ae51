import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.job.yamlfile import MAX_BYTES, Place, YamlProblem, parse, scalar


@pytest.mark.parametrize("key", ["N", "n", "no", "on", "off", "yes", "y", "~", "null", "1", "true", "1.5"])
def test_every_key_is_text(key):
    assert parse(f"{key}: 1").data == {key: 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        (".inf", math.inf),
        ("2026-11-21", "2026-11-21"),
        ("<<", "<<"),
        (".", "."),
        ("-", "-"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_nan():
    assert math.isnan(scalar(".nan"))


def test_a_number_with_too_many_digits_stays_text():
    assert scalar("9" * 5000) == "9" * 5000


def test_quoted_scalars_are_text():
    assert parse("""{a: "1", b: 'true', c: "no"}""").data == {"a": "1", "b": "true", "c": "no"}


def test_places_of_keys_and_values():
    document = parse("a: 1\nb:\n  c: [x, 12.10]\n")
    assert document.keys[("b", "c")] == Place(3, 3)
    assert document.values[("b", "c")] == Place(3, 6)
    assert document.keys[("b", "c", 1)] == Place(3, 10)
    assert document.texts[("b", "c", 1)] == "12.10"
    assert document.place(("b", "c", "d", "e")) == Place(3, 3)
    assert document.place(("z",)) == Place(1, 1)


@pytest.mark.parametrize(
    ("text", "line", "path", "must", "got"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, ("a",), "be given once", "again, first on line 1"),
        ("x:\n  a: 1\n  a: 1\n", 3, ("x", "a"), "be given once", "again, first on line 2"),
        ("a: &x [1]\n", 1, ("a",), "not have an anchor", "&x"),
        ("a: [1]\nb: *x\n", 2, ("b",), "not be an alias", "*x"),
        ("a: !!python/name:os.system x\n", 1, ("a",), "not have a tag", "tag:yaml.org,2002:python/name:os.system"),
        ("a: !!str 1\n", 1, ("a",), "not have a tag", "tag:yaml.org,2002:str"),
        ("? [a, b]\n: 1\n", 1, (), "have plain text as keys", "a list"),
        ("&k a: 1\n", 1, (), "have plain text as keys", "a tagged or anchored key"),
        ("!!str a: 1\n", 1, (), "have plain text as keys", "a tagged or anchored key"),
        ("? {a: b}\n: 1\n", 1, (), "have plain text as keys", "a mapping"),
        ("a: 1\n---\nb: 2\n", 2, (), "be one document", "a second one after ---"),
        ("a: 1\n\tb: 2\n", 2, (), "be valid YAML", None),
        ("a: [1, 2\n", 2, (), "be valid YAML", None),
        ("a: b: c\n", 1, (), "be valid YAML", None),
        ("a: \x00\n", 1, (), "be valid YAML", "control characters are not allowed, here 0x00"),
        ("ä: ö\nb: \x07\n", 2, (), "be valid YAML", "control characters are not allowed, here 0x07"),
    ],
)
def test_refused(text, line, path, must, got):
    with pytest.raises(YamlProblem) as raised:
        parse(text)
    problem = raised.value
    assert (problem.place.line, problem.path, problem.must) == (line, path, must)
    assert got is None or problem.got == got


def test_depth_and_length_are_bounded():
    with pytest.raises(YamlProblem, match="nest at most 32 deep"):
        parse("[" * 5000 + "]" * 5000)
    with pytest.raises(YamlProblem, match="characters long"):
        parse("#" * (MAX_BYTES + 1))


@given(st.text(max_size=200))
def test_any_text_is_a_document_or_a_problem(text):
    with contextlib.suppress(YamlProblem):
        parse(text)


_TEXT = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")))
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT


@given(st.recursive(_SCALARS, lambda s: st.lists(s) | st.dictionaries(_TEXT, s), max_leaves=8))
def test_json_is_read_as_json(value):
    assert parse(json.dumps(value)).data == value
