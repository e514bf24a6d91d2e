"""Whatever a user hands in, the answer is a document or one clear `InputError`."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from exatwin.topology.errors import InputError
from exatwin.topology.files import MOST_BYTES, build, bundled_names, parse_document, read_document


def read(name):
    return read_document(str(name), "exatwin.topology", "machines", "machine")


def message(text, suffix=".yaml"):
    with pytest.raises(InputError) as caught:
        parse_document(text, suffix, "mine")
    said = str(caught.value)
    assert said.startswith("mine: ")
    assert "\n" not in said
    assert len(said) < 300
    return said


def test_a_bundled_name_is_found():
    document, where = read("frontier")
    assert (document["name"], where) == ("frontier", "frontier")
    assert "frontier" in bundled_names("exatwin.topology", "machines")


@pytest.mark.parametrize(
    ("ending", "text"),
    [("yaml", "a: {b: 1}"), ("json", '{"a": {"b": 1}}'), ("toml", "[a]\nb = 1"), ("txt", "a: {b: 1}")],
)
def test_the_three_formats_hold_the_same(tmp_path, ending, text):
    path = tmp_path / f"mine.{ending}"
    path.write_text(text)
    assert read(path) == ({"a": {"b": 1}}, str(path))


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read(path)[0] == {"a": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"# only a comment\n", "holds nothing where a mapping of fields is needed"),
        (b"- a\n- b\n", "holds a list where a mapping of fields is needed"),
        (b"just words", "holds a text where a mapping of fields is needed"),
        (b"12", "holds a number where a mapping of fields is needed"),
        (b"a: 1\0", "is a binary file, text is needed"),
        (b"\x7fELF\x02\x01\x01" + bytes(9), "is a binary file, text is needed"),
        (b"\x89PNG\xff\xfe", "is not UTF-8 text"),
        (b"a: \x01", "is not valid YAML"),
        (b"a: {b: 1, c: [1, 2", "is not valid YAML: line 1"),
        (b"a: 1\n b: 2\n", "is not valid YAML: line 2"),
        (b"a: 1\n---\nb: 2\n", "is not valid YAML: line 2"),
        (b"a: !!python/object/apply:os.system [ls]", "is not valid YAML: line 1"),
        (b"#" * (MOST_BYTES + 1), "is too large"),
    ],
)
def test_a_file_that_holds_no_document_says_so(tmp_path, content, said):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_every_way_to_cut_a_file_short_ends_in_a_document_or_an_error():
    text = json.dumps(read("frontier")[0])
    for end in range(0, len(text), 37):
        for suffix in (".json", ".yaml"):
            with pytest.raises(InputError):
                parse_document(text[:end], suffix, "cut")


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a directory, a file is needed"):
        read(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is a directory, a file is needed"):
        read("folder")


def test_an_unknown_name_suggests_a_bundled_one():
    with pytest.raises(InputError, match=r"no machine of that name is bundled.*did you mean frontier\?"):
        read("fronteir")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a\0b.yaml", "x" * 5000, "~nobody-here/x.yaml", "/dev/null", "frontier/"]
)
def test_a_name_that_no_file_can_have_is_an_input_error(name):
    with pytest.raises(InputError) as caught:
        read(name)
    assert len(str(caught.value)) < 500


def test_an_endless_file_is_read_no_further_than_needed():
    with pytest.raises(InputError, match="is a binary file"):
        read("/dev/zero")


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("a: 1\nb: 2\na: 3\n", ".yaml"),
        ("x: {a: 1, a: 2}", ".yaml"),
        ('{"a": 1, "a": 2}', ".json"),
        ("a = 1\na = 2", ".toml"),
    ],
)
def test_a_key_written_twice_is_refused(text, suffix):
    said = message(text, suffix)
    assert "'a' stands twice" in said or suffix == ".toml"


@pytest.mark.parametrize("key", ["[1, 2]", "{a: 1}", "!!set {a}"])
def test_a_key_has_to_be_a_word(key):
    assert "a key must be a word" in message(f"? {key}\n: 1\n")


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": -Infinity}'])
def test_json_has_no_endless_numbers(text):
    assert "is no number" in message(text, ".json")


def test_a_yaml_bomb_is_refused_before_it_grows():
    lines = ['a0: &a0 ["lol", "lol"]'] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 64)]
    assert "aliases (*name) are not read" in message("\n".join(lines))
    assert "aliases (*name) are not read" in message("a: &x {b: 1}\nc: {<<: *x}")


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("a: " + "[" * 100_000, ".yaml"),
        ("a: " + "[" * 5_000 + "]" * 5_000, ".yaml"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", ".json"),
        ("a = " + "[" * 100_000 + "]" * 100_000, ".toml"),
    ],
)
def test_deep_nesting_is_refused(text, suffix):
    form = {".yaml": "YAML", ".json": "JSON", ".toml": "TOML"}[suffix]
    assert f"is not valid {form}: nested too deeply" in message(text, suffix)


@pytest.mark.parametrize(
    ("text", "suffix"), [("a: " + "9" * 10_000, ".yaml"), ('{"a": ' + "9" * 10_000 + "}", ".json")]
)
def test_a_number_of_ten_thousand_digits_is_refused(text, suffix):
    assert "is not valid" in message(text, suffix)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_document_or_an_input_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "mine.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(read(path)[0], dict)
    except InputError as error:
        assert str(error)


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    tricks: list[str]


class Home(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    rooms: dict[Literal["kitchen", "cellar"], Cat] = {}
    guests: list[Cat | str] = []
    area: float = Field(default=1.0, gt=0, alias="size")


def problems(document):
    with pytest.raises(InputError) as caught:
        build(Home, document, "home.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"pett": None}, "pett: unknown key; did you mean pet?"),
        ({"sise": 1}, "sise: unknown key; did you mean size?"),
        ({"zzz": 1}, "zzz: unknown key; known: pet, rooms, guests, size"),
        ({"pet": {"kind": "cat", "lifes": 9, "lives": 9}}, "pet.lifes: unknown key; did you mean lives?"),
        ({"pet": {"kind": "cat"}}, "pet.lives: is needed and missing"),
        ({"pet": {"lives": 9}}, "pet.kind: is needed and missing"),
        ({"pet": {"kind": "cow"}}, "pet.kind: has to be one of 'cat', 'dog', but it is 'cow'"),
        ({"pet": {"kind": "dog", "tricks": ["sit", 2]}}, "pet.tricks.1: input should be a valid string, but it is 2"),
        (
            {"rooms": {"attic": {"kind": "cat", "lives": 1}}},
            "rooms.attic: input should be 'kitchen' or 'cellar', but it is 'attic'",
        ),
        ({"rooms": {"cellar": {"kind": "cat", "lives": "x"}}}, "rooms.cellar.lives: input should be a valid integer"),
        ({"rooms": {"cellar": 7}}, "rooms.cellar: a mapping of fields is needed, but it is 7"),
        ({"size": -1}, "size: input should be greater than 0, but it is -1"),
        ({"guests": [{"kind": "cat", "live": 3}]}, "guests.0.live: unknown key; did you mean lives?"),
    ],
)
def test_a_wrong_field_is_named_as_the_user_wrote_it(document, said):
    assert any(problem.startswith(said) for problem in problems(document)), problems(document)


def test_all_problems_are_reported_at_once():
    said = problems({"pett": 1, "size": 0, "pet": {"kind": "cat", "lives": "many", "tail": 1}})
    assert [line.split(":")[0] for line in said] == ["pet.lives", "pet.tail", "size", "pett"]


def test_a_huge_wrong_value_is_not_repeated_in_full():
    deep: object = 0
    for _ in range(900):
        deep = [deep]
    said = problems({"size": deep, "x" * 100_000: 1, "rooms": "y" * 100_000})
    assert all(len(line) < 300 for line in said)
