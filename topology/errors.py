"""What is wrong with an input, said once and in full.

Every room raises `InputError` for what a user wrote, so that the command line
can print one clear message and leave with exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MOST_NAMED = 100
"""How many valid words an error lists whole; the bundled models, the longest list that people pick from, are 70."""


@dataclass(frozen=True)
class Problem:
    """One violated rule.

    Attributes:
        field: Dotted path of the field, such as ``layout.tp``; empty for the whole document.
        message: The rule, the value that breaks it, and what would be valid.
    """

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InputError(ValueError):
    """Something a user wrote cannot be used.

    Args:
        where: The file or the option it was read from; empty where there is none.
        problems: Every violated rule, not the first alone.
    """

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        super().__init__(where, tuple(problems))
        self.where = where
        self.problems = tuple(problems)

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        if len(self.problems) == 1:
            return f"{head}{self.problems[0]}"
        lines = [f"{head}{len(self.problems)} problems"]
        lines += [f"  - {problem}" for problem in self.problems]
        return "\n".join(lines)


class RunError(RuntimeError):
    """Something that was begun could not be ended, through no fault of the input; the message is for people."""


def input_error(message: str, *, where: str = "", field: str = "") -> InputError:
    """An `InputError` with one problem."""
    return InputError(where, [Problem(field, message)])


@contextmanager
def told_as(where: str, **fields: str) -> Iterator[None]:
    """Name the fields that an `InputError` is about, for code that does not know who asks.

    >>> with told_as("scenario mine", collective="collectives.dp.all_reduce"):
    ...     raise input_error("is unknown", field="collective.algorithm")
    Traceback (most recent call last):
    exatwin.topology.errors.InputError: scenario mine: collectives.dp.all_reduce: is unknown
    """
    try:
        yield
    except InputError as error:
        told = [(fields.get(problem.field.partition(".")[0], problem.field), problem) for problem in error.problems]
        raise InputError(where, [Problem(field, problem.message) for field, problem in told]) from None


def nearest(word: str, choices: Iterable[str]) -> str:
    """The suggestion that ends an error about an unknown word.

    >>> nearest("recompte", ["recompute", "schedule"])
    '; did you mean recompute?'
    >>> nearest("zzz", ["recompute", "schedule"])
    '; known: recompute, schedule'

    Where there are more than anybody would read, the closest are named and the rest counted.
    """
    known = list(choices)
    lowered = {choice.lower(): choice for choice in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {lowered[close[0]]}?"
    if len(known) > MOST_NAMED:
        named = difflib.get_close_matches(word.lower(), lowered, n=12, cutoff=0.0)
        return f"; closest of {len(known):,} known: {', '.join(lowered[name] for name in named)}"
    return f"; known: {', '.join(known)}" if known else ""


def nearest_numbers(value: int, valid: Iterable[int], most: int = 12) -> str:
    """The valid numbers closest to a value, in order, for the end of an error.

    >>> nearest_numbers(6, [1, 2, 4, 8, 16, 32, 64])
    '1, 2, 4, 8, 16, 32, 64'
    """
    chosen = sorted(sorted(set(valid), key=lambda number: (abs(number - value), number))[:most])
    return ", ".join(str(number) for number in chosen)
