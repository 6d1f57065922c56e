"""What a workload hands back: tables for people, figures that are held to targets, samples for the JSON file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

__all__ = ["LATENESS", "Column", "Figure", "Result", "Table", "median", "quantile", "quantiles"]

Cell = str | float | None


class Column(NamedTuple):
    """A column of a table; `digits` behind the point, None for text."""

    title: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows to be printed and written into the documentation."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def text(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [[_show(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    """One number with a name; held to a target where there is one."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str:
        """The target in words, empty without one."""
        if self.at_least is not None:
            return f"at least {_number(self.at_least)} {self.unit}"
        if self.at_most is not None:
            return f"at most {_number(self.at_most)} {self.unit}"
        return ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is met, None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return f"{_number(self.value)} {self.unit}"


@dataclass(frozen=True)
class Result:
    """All that a workload measured."""

    table: Table
    figures: Sequence[Figure] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "columns": [column.title for column in self.table.columns],
            "digits": [column.digits for column in self.table.columns],
            "rows": [list(row) for row in self.table.rows],
            "figures": [dataclasses.asdict(figure) for figure in self.figures],
            "details": self.details,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """What as_json wrote."""
        columns = [Column(title, digits) for title, digits in zip(data["columns"], data["digits"], strict=True)]
        return cls(Table(columns, data["rows"]), [Figure(**figure) for figure in data["figures"]], data["details"])


LATENESS: Final = ("p50", "p99", "max")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of all (0 to 1) do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * share), 1) - 1]


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p99 and the greatest."""
    return quantile(values, 0.5), quantile(values, 0.99), max(values)


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the lower of the two."""
    return quantile(values, 0.5)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def _show(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str) or column.digits is None:
        return str(cell)
    return f"{cell:,.{column.digits}f}"
