"""Interface of row optimizers; no other code asks which one it is.

Legend: D width of a row, S numbers of its slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

NO_SCALARS: Mapping[str, float] = MappingProxyType({})
"""Scalars of a push with the table's own numbers."""


@dataclass(frozen=True)
class Slot:
    """State of an optimizer: one number beside each number of a row, or beside the row.

    It is zero before the row's first update.
    """

    name: str
    is_non_negative: bool = False
    """Whether it is never below zero, so that a negative restored value is damage."""
    per_row: bool = False
    """Whether it is one number per row; such slots come after the others."""

    def width(self, dim: int) -> int:
        """Return its numbers beside a row of width ``dim``."""
        return 1 if self.per_row else dim


class Drift(NamedTuple):
    """Momentum that also acts on rows that a step does not touch."""

    momentum: float
    weight_decay: float


class RowOptimizerSpec:
    """Base of row optimizers: a frozen dataclass of numbers; on the wire and in snapshots its name and scalars.

    Compiled code (``optimizers/`` of the core) and tensor operations (for rows on ranks) know it by the same name.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]] = ()
    state: ClassVar[str] = ""
    """Content of the slots, in a word or two."""
    takes_narrow_slots: ClassVar[bool] = True
    """Whether slots may be stored in 16 bits."""
    saves_gradient_buffer: ClassVar[bool] = False
    """Whether PLSC's form of it for rows on devices keeps no gradient of every row; memory reports compare with it."""

    lr: float

    @property
    def fixed(self) -> Mapping[str, str]:
        """Fields that cannot change during the table's life, and why; a push may carry other values of the rest."""
        return {}

    @property
    def fixed_scalars(self) -> Mapping[str, str]:
        """Entries of :attr:`fixed` by the names of :meth:`scalars`."""
        return self.fixed

    @property
    def counts_updates(self) -> bool:
        """Whether an update depends on the number of earlier updates of the row."""
        return False

    @property
    def drift(self) -> Drift | None:
        """Movement of rows at steps that do not touch them; None: they do not move."""
        return None

    def slot_dim(self, dim: int) -> int:
        """Return the numbers of all slots beside a row of width ``dim``."""
        return sum(slot.width(dim) for slot in self.slots)

    def settings(self) -> dict[str, Any]:
        """Return its constructor's arguments, by name and in their types."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}  # type: ignore[arg-type]

    def scalars(self) -> dict[str, float]:
        """Return its constructor's arguments as numbers, by name; a flag is 0 or 1."""
        return {setting.name: float(getattr(self, setting.name)) for setting in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        """Return the optimizer of :meth:`scalars`, by default where missing. Raises TypeError, InvalidArgument."""
        flags = {setting.name for setting in fields(cls) if setting.default is False}  # type: ignore[arg-type]
        return cls(**{name: flag(name, value) if name in flags else value for name, value in scalars.items()})

    @lru_cache(maxsize=1024)  # noqa: B019 (specs are small and compared by value; every push asks for the same ones)
    def scalars_of_push(self, optimizer: RowOptimizerSpec) -> Mapping[str, float]:
        """Return the scalars by which a push, beside ``optimizer.lr``, has this table trained by ``optimizer``.

        They are those of its :meth:`scalars` that differ from this one's. Raises InvalidArgument for another kind, and
        for a value of :attr:`fixed` that is not the table's.
        """
        require(type(self) is type(optimizer), f"{optimizer} cannot take the place of {self} in a push")
        for name, reason in self.fixed.items():
            own, other = getattr(self, name), getattr(optimizer, name)
            require(own == other, f"{name} is {other!r}, the table's is {own!r}, and it cannot change: {reason}")
        own_scalars = self.scalars()
        scalars = optimizer.scalars().items()
        return {name: of for name, of in scalars if name != "lr" and of != own_scalars[name]}

    def with_numbers(self, other: RowOptimizerSpec) -> RowOptimizerSpec:
        """Return ``other`` with this one's values of :attr:`fixed`; itself, if ``other`` is of another kind."""
        if type(self) is not type(other):
            return self
        return replace(other, **{name: getattr(self, name) for name in self.fixed})  # type: ignore[type-var]

    def for_push(self, scalars: Mapping[str, float]) -> Self:
        """Return the optimizer that applies a push with ``scalars``; that of the table if there are none.

        Raises InvalidArgument for a name that is not among its :meth:`scalars`, a value outside its range, and one that
        cannot change.
        """
        if not scalars:
            return self
        own = self.scalars()
        for name in scalars:
            require(
                name in own and name != "lr",
                f"a push for {self.name} cannot carry {quoted(name)}; it can carry "
                + ", ".join(scalar for scalar in own if scalar != "lr"),
            )
        optimizer = self.from_scalars({**own, **scalars})
        self.scalars_of_push(optimizer)
        return optimizer


def require(condition: bool, message: str) -> None:
    """Raise InvalidArgument with ``message`` unless ``condition``."""
    if not condition:
        raise InvalidArgument(message)


def require_rate(name: str, value: float) -> None:
    """Raise InvalidArgument unless ``value`` is a finite number >= 0."""
    real_number(name, value)
    require(math.isfinite(value) and value >= 0, f"{name} is {value!r}; it must be finite and >= 0")


def require_divisor(name: str, value: float) -> None:
    """Raise InvalidArgument unless a division by a root plus ``value`` is never one by zero."""
    require_rate(name, value)
    require(2.0**-126 <= value < 2.0**127, f"{name} is {value!r}; it must lie in [1.2e-38, 1.7e38)")


def flag(name: str, value: float) -> bool:
    """Return the flag of a number. Raises InvalidArgument unless it is 0 or 1."""
    require(value in (0, 1), f"{name} is {value!r}; it must be 0 or 1")
    return bool(value)
