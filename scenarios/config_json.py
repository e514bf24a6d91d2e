"""A Hugging Face ``config.json`` that is asked for its keys, and remembers what was wrong with them."""

from __future__ import annotations

from typing import Any

from ..topology.errors import Problem

Fields = dict[str, Any]


class Config:
    """One such file; `problems` holds all that was wrong with what was asked for.

    Args:
        document: Its content.
        architecture: Whose it is, for messages.
        within: Path of an inner mapping, ended by a dot.
    """

    def __init__(self, document: Fields, architecture: str, within: str = "") -> None:
        self.document = document
        self.architecture = architecture
        self.within = within
        self.problems: list[Problem] = []

    def inner(self, key: str) -> Config:
        """A mapping inside, whose problems are this one's too."""
        value = self.document.get(key)
        inner = Config(value if isinstance(value, dict) else {}, self.architecture, within=f"{self.within}{key}.")
        inner.problems = self.problems
        return inner

    def refuse(self, key: str, message: str) -> None:
        """Note a problem with a key."""
        self.problems.append(Problem(f"{self.within}{key}", message))

    def number(self, *keys: str, default: int | None = None) -> int | None:
        """A whole number by the first of its names that is there; needed where it has no default."""
        value = next((self.document[key] for key in keys if self.document.get(key) is not None), None)
        if value is None and default is None:
            self.refuse(keys[0], f"is needed by {self.architecture} and missing")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self.refuse(keys[0], f"should be a whole number, but it is {str(value)[:40]!r}")
        else:
            return default if value is None else value
        return 1  # any number: the problem is what is said

    def maybe(self, *keys: str) -> int | None:
        """A whole number that may be left out or null."""
        return self.number(*keys) if any(self.document.get(key) is not None for key in keys) else None

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.document.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, f"should be true or false, but it is {str(value)[:40]!r}")
            return default
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value that asks for what no model here has."""
        value = self.document.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in allowed)
            self.refuse(key, f"{str(value)[:40]} of {self.architecture} is not read; there is {shown}")

    def window(self) -> Fields:
        """A note where attention sees a part of the sequence only."""
        window = self.document.get("sliding_window")
        if not isinstance(window, int) or isinstance(window, bool) or not self.flag("use_sliding_window", True):
            return {}
        return {"note": f"Its sliding windows of {window} tokens are read as full attention."}
