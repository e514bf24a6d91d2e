"""Reading what users write: YAML, JSON or TOML, bundled or their own.

A name is looked for among the bundled files; anything with a folder or an
ending is a path. Every failure is an `InputError` that names the file.
"""

from __future__ import annotations

import json
import pickle
import reprlib
import tomllib
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import InputError, Problem, input_error, nearest

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
MOST_BYTES = 4 * 2**20  # a scenario or machine file is a few KiB; more is another kind of file

ModelT = TypeVar("ModelT", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, and aliases, which a few lines can blow up into gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {line}: aliases (*name) are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.YAMLError(f"line {line}: a key must be a word")
            if key in seen:
                raise yaml.YAMLError(f"line {line}: key {_shown(key)} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def bundled_names(package: str, folder: str) -> list[str]:
    """Names of the files that ship with the package, without their ending."""
    root = resources.files(package) / folder
    return sorted(entry.name.removesuffix(".yaml") for entry in root.iterdir() if entry.name.endswith(".yaml"))


def looks_like_path(name: str) -> bool:
    """Whether a user meant a file rather than a bundled name."""
    return "/" in name or "\\" in name or name.endswith(SUFFIXES)


def read_text(source: Path | Traversable, where: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, or an `InputError` that says why not."""
    try:
        if source.is_dir():
            raise input_error("is a directory, a file is needed", where=where)
        with source.open("rb") as stream:
            data = stream.read(most_bytes + 1)
    except FileNotFoundError:
        raise input_error("no such file", where=where) from None
    except OSError as error:
        raise input_error(f"cannot be read: {error.strerror or error}", where=where) from None
    if b"\0" in data:
        raise input_error("is a binary file, text is needed", where=where)
    if len(data) > most_bytes:
        raise input_error(f"is too large; a file of this kind has at most {most_bytes} bytes", where=where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise input_error("is not UTF-8 text", where=where) from None


def parse_document(text: str, suffix: str, where: str) -> dict[str, Any]:
    """A mapping from YAML, JSON or TOML text.

    Args:
        text: What the file holds.
        suffix: Its ending, which says the format; ``.yaml`` where in doubt.
        where: The name that errors carry.

    Raises:
        InputError: If the text is empty, cut short, or not a mapping.
    """
    if not text.strip():
        raise input_error("is empty", where=where)
    document: Any
    form = {".json": "JSON", ".toml": "TOML"}.get(suffix, "YAML")
    try:
        if form == "JSON":
            document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        elif form == "TOML":
            document = tomllib.loads(text)
        else:
            document = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise input_error(f"is not valid {form}: nested too deeply", where=where) from None
    except json.JSONDecodeError as error:
        raise input_error(f"is not valid JSON: line {error.lineno}: {error.msg}", where=where) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise input_error(f"is not valid {form}: {line}{reason}", where=where) from None
    if not isinstance(document, dict):
        raise input_error(f"holds {_kind(document)} where a mapping of fields is needed", where=where)
    return {str(key): value for key, value in document.items()}


@lru_cache(maxsize=128)
def _parsed(text: str, where: str) -> bytes:
    """A bundled document, kept by its text as one call after another asks for the same; each call unpacks its own."""
    return pickle.dumps(parse_document(text, ".yaml", where))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {_shown(twice)} stands twice")
    return document


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def read_document(name: str, package: str, folder: str, kind: str) -> tuple[dict[str, Any], str]:
    """The document behind a bundled name or a path, and the name for its errors.

    Args:
        name: ``frontier``, or ``./mine.yaml``.
        package: Package whose folder holds the bundled ones, such as ``exatwin.topology``.
        folder: That folder, such as ``machines``.
        kind: What is looked for, for the error: ``machine``.

    Raises:
        InputError: If it is neither bundled nor a readable file.
    """
    where = name if len(name) <= 200 else f"{name[:197]}..."
    names = bundled_names(package, folder)
    if name in names:
        text = read_text(resources.files(package) / folder / f"{name}.yaml", name)
        return pickle.loads(_parsed(text, name)), name
    try:
        path = Path(name).expanduser()
        if name and (looks_like_path(name) or path.exists()):
            return parse_document(read_text(path, where), path.suffix.lower(), where), where
    except (OSError, ValueError, RuntimeError) as error:  # a name no file can have; an unknown ~user
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise input_error(f"is no usable path: {reason}", where=where) from None
    raise input_error(
        f"no {kind} of that name is bundled, and there is no such file{nearest(name, names)}", where=where
    )


def build(model: type[ModelT], document: dict[str, Any], where: str, prefix: str = "") -> ModelT:
    """A validated model from a document; all violations at once.

    Raises:
        InputError: With one problem a violated rule; an unknown key suggests the nearest one.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InputError(where, problems_of(error, model, prefix)) from None


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """What pydantic found, in our words."""
    found: dict[tuple[str, ...], list[tuple[ErrorDetails, list[str]]]] = {}
    for item in error.errors(include_url=False):
        path, known = _locate(model, item["loc"])
        found.setdefault(tuple(path), []).append((item, known))
    problems = []
    for steps, items in found.items():
        # A field of several kinds is refused as each of them; if it is one of them, only what is wrong inside counts.
        inside = any(len(other) > len(steps) and other[: len(steps)] == steps for other in found)
        other_kinds = [item for item, _ in items if item["type"] in _OTHER_KIND]
        merged = inside or len(other_kinds) > 1
        for item, known in items:
            if merged and item["type"] in _OTHER_KIND:
                continue
            field = ".".join(([prefix] if prefix else []) + [_short(part) for part in steps])
            if item["type"].startswith("union_tag"):
                field = ".".join(([field] if field else []) + [item["ctx"]["discriminator"].strip("'")])
            problems.append(Problem(field, _message(item, list(steps), known)))
        if len(other_kinds) > 1 and not inside:
            allowed = " or ".join(dict.fromkeys(_allowed(item) for item in other_kinds))
            field = ".".join(([prefix] if prefix else []) + [_short(part) for part in steps])
            problems.append(Problem(field, f"input should be {allowed}, but it is {_shown(other_kinds[0]['input'])}"))
    return list(dict.fromkeys(problems))


# What pydantic says of a value that is no member of a union's branch at all.
_OTHER_KIND = frozenset(
    f"{kind}_type" for kind in ("tuple", "list", "string", "int", "float", "bool", "dict", "model")
) | {"literal_error"}


def _allowed(item: ErrorDetails) -> str:
    words = {"tuple_type": "a list", "list_type": "a list", "dict_type": "a mapping of fields"}
    return words.get(item["type"]) or item["msg"].removeprefix("Input should be ").replace(" valid ", " ")


def _message(item: ErrorDetails, path: list[str], known: list[str]) -> str:
    kind, message = item["type"], item["msg"]
    match kind:
        case "extra_forbidden":
            return f"unknown key{nearest(path[-1], known)}"
        case "missing" | "union_tag_not_found":
            return "is needed and missing"
        case "union_tag_invalid":
            return f"has to be one of {item['ctx']['expected_tags']}, but it is {_shown(item['ctx']['tag'])}"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"a mapping of fields is needed, but it is {_shown(item['input'])}"
        case "value_error" | "assertion_error":
            return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{message[:1].lower()}{message[1:]}, but it is {_shown(item['input'])}"


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The path a user would write for a place that pydantic names, and the keys known at its last step.

    Pydantic's own path also holds the labels of union members and the word ``[key]``.
    """
    path: list[str] = []
    known: list[str] = []
    current: list[Any] = [model]
    for part in loc:
        step = str(part)
        if step == "[key]":
            continue
        fields = {key: kind for member in current for key, kind in _fields(member).items()}
        values = [inner for member in current for inner in _values(member)]
        if step in fields:
            path.append(step)
            known, current = list(fields), list(_members(fields[step]))
        elif len(current) > 1 and any(_is_labelled(member, part) for member in current):
            current = [member for member in current if _is_labelled(member, part)]
        elif isinstance(part, int) or (values and not fields):
            path.append(step)
            known, current = _keys(current), [inner for value in values for inner in _members(value)]
        elif not step.startswith("function-"):
            path.append(step)
            known, current = list(fields), []
    return path, known


def _members(annotation: Any) -> Iterator[Any]:
    """The types that an annotation stands for, without ``None``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not NoneType:
        yield annotation


def _fields(member: Any) -> dict[str, Any]:
    """The keys of a model and the types of their values."""
    if not (isinstance(member, type) and issubclass(member, BaseModel)):
        return {}
    return {field.alias or name: field.annotation for name, field in member.model_fields.items()}


def _values(member: Any) -> tuple[Any, ...]:
    """The types of what a mapping or a list holds."""
    arguments = tuple(argument for argument in get_args(member) if argument is not Ellipsis)
    if get_origin(member) is dict:
        return arguments[1:]
    return arguments if get_origin(member) in (list, tuple, Sequence) else ()


def _keys(members: list[Any]) -> list[str]:
    """The keys of mappings that allow only some."""
    mappings = [get_args(member)[0] for member in members if get_origin(member) is dict]
    return [str(key) for mapping in mappings if get_origin(mapping) is Literal for key in get_args(mapping)]


def _is_labelled(member: Any, part: int | str) -> bool:
    """Whether pydantic calls a union's member so: by its tag, or by its type's name."""
    if isinstance(part, int):
        return False
    tags = (get_args(kind) for kind in _fields(member).values() if get_origin(kind) is Literal)
    name = getattr(member, "__name__", str(member))
    return part == name or any(part in tag for tag in tags) or part.partition("[")[0].lower() == name.lower() != "dict"


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", int: "a number", float: "a number", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )


def _shown(value: Any) -> str:
    shown = reprlib.repr(value) if not isinstance(value, str) else repr(value[:60])  # bounded however deep the value is
    return _short(shown)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
