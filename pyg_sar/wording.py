"""Words for what is printed: numbers with their nouns, tables as text and as HTML."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

_LONGEST = 300  # characters of a value in a table of fields


def counted(number: int, noun: str) -> str:
    """Returns ``'1 worker'`` or ``'1,200 workers'``, given the plural as the last word."""
    if number == 1:
        noun = re.sub(r"(?<=ss)es$|s$", "", noun)
    return f"{number:,} {noun}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table's rows as lines of text, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class Shown:
    """A result that a notebook shows as tables, and ``print`` as text.

    Tables are the lines of ``str(self)`` that have several cells, with two spaces or more between
    them. A dataclass without a text of its own is a table of its fields.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Returns the text as HTML, for notebooks."""
        return "\n".join(_as_html(self._lines()))

    def _lines(self) -> Iterator[list[str]]:
        if type(self).__str__ is not object.__str__:
            yield from (re.split(r" {2,}", line.strip()) for line in str(self).splitlines())
        elif dataclasses.is_dataclass(self):
            yield ["field", "value"]
            for field in dataclasses.fields(self):
                text = repr(getattr(self, field.name))
                yield [field.name, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."]


def _as_html(lines: Iterator[list[str]]) -> Iterator[str]:
    for is_table, rows in groupby(lines, lambda cells: len(cells) > 1):
        if not is_table:
            yield from (f"<div>{html.escape(cells[0])}</div>" for cells in rows)
            continue
        yield "<table>"
        for cells in rows:
            # A row of names is a head, also in the middle: another table follows the first.
            tag = "td" if any(re.search(r"\d|^-$", cell) for cell in cells) else "th"
            yield "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"
        yield "</table>"
