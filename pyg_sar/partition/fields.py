"""Plain values that came from a JSON file, each read by its type; errors name file and field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyg_sar.errors import PartitionError

_MOST = 2**63 - 1


class Fields:
    """An object of a partition's metadata. Every method raises :class:`PartitionError`.

    Args:
        file: The file that it came from.
        content: The object.
        place: Where it stands in the file, such as ``'parts[0]'``.
    """

    def __init__(self, file: Path, content: Any, place: str = "") -> None:
        self.file, self.place = file, place
        self.content: Mapping[str, Any] = content
        if not isinstance(content, dict):
            raise self.wrong("", "an object", content)

    def wrong(self, name: str, expected: str, got: Any) -> PartitionError:
        """The error for a field."""
        where = ".".join(filter(None, (self.place, name)))
        text = repr(got)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return PartitionError(
            f"'{self.file}': expected '{where}' to be {expected} (got {shown}); copy it again or "
            "partition the graph anew"
        )

    def get(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        """A field that must be there and fit."""
        if name not in self.content:
            raise self.wrong(name, expected, "nothing")
        value = self.content[name]
        if not fits(value):
            raise self.wrong(name, expected, value)
        return value

    def count(self, name: str, least: int = 0, most: int = _MOST) -> int:
        """A whole number."""
        limit = f"from {least} to {most}" if most < _MOST else f"of at least {least}"
        found: int = self.get(
            name, f"a whole number {limit}", lambda v: _is_int(v) and least <= v <= most
        )
        return found

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        """A string, one of ``choices`` if there are any."""
        expected = "one of " + ", ".join(choices) if choices else "a text"
        found: str = self.get(
            name, expected, lambda v: isinstance(v, str) and (not choices or v in choices)
        )
        return found

    def flag(self, name: str) -> bool:
        """``true`` or ``false``."""
        found: bool = self.get(name, "true or false", lambda v: isinstance(v, bool))
        return found

    def counts(self, name: str, length: int | None = None) -> list[int]:
        """Whole numbers of at least 0; as many as ``length``."""
        number = "" if length is None else f"{length} "
        found: list[int] = self.get(
            name,
            f"{number}whole numbers of at least 0",
            lambda v: (
                isinstance(v, list)
                and length in (None, len(v))
                and all(_is_int(n) and 0 <= n <= _MOST for n in v)
            ),
        )
        return found

    def texts(self, name: str, length: int) -> list[str]:
        """So many strings."""
        found: list[str] = self.get(
            name,
            f"{length} texts",
            lambda v: isinstance(v, list) and len(v) == length and all(_is_str(t) for t in v),
        )
        return found

    def same(self, name: str, expected: Any) -> None:
        """A field that other fields tell already."""
        self.get(name, f"{expected!r}", lambda v: type(v) is type(expected) and v == expected)

    def inner(self, name: str) -> Fields:
        """An object."""
        value = self.get(name, "an object", lambda v: isinstance(v, dict))
        return Fields(self.file, value, ".".join(filter(None, (self.place, name))))

    def items(self) -> dict[str, Fields]:
        """All fields, which are objects."""
        return {name: self.inner(name) for name in self.content}

    def rows(self, name: str, length: int | None = None) -> list[Fields]:
        """A list of objects; as many as ``length``."""
        number = "" if length is None else f"{length} "
        rows = self.get(
            name,
            f"a list of {number}objects",
            lambda v: isinstance(v, list) and length in (None, len(v)),
        )
        start = ".".join(filter(None, (self.place, name)))
        return [Fields(self.file, row, f"{start}[{k}]") for k, row in enumerate(rows)]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)
