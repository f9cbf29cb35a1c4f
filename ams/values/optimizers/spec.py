"""What every optimizer of rows says about itself; nobody else asks which one it is.

Legend: D width of a row, S slots of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import InvalidArgument

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Slot:
    """One number of an optimizer's state beside each number of a row. It is zero before the row's first update."""

    name: str
    is_non_negative: bool = False
    """Whether it can never be below zero, so that a restored one that is must be damaged."""


class Drift(NamedTuple):
    """Momentum that also acts on rows that a step does not touch."""

    momentum: float
    weight_decay: float


class UpdateStep(NamedTuple):
    """What an update of a row depends on beside row, slots and gradient."""

    lr: float
    scale: float = 1.0
    """Multiplies the gradient."""
    t: int = 1
    """Number of the row's update, from 1."""
    dtype: type[np.floating[Any]] = np.float32
    """What it is computed in."""


class RowOptimizerSpec(ABC):
    """A frozen dataclass of numbers; on the wire and in snapshots it is :attr:`name` and :meth:`scalars`.

    Compiled code (``optimizers/`` of the core) and tensor operations (for rows on ranks) know it by the same name.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]] = ()
    state: ClassVar[str] = ""
    """What the slots hold, in a word or two."""
    takes_narrow_slots: ClassVar[bool] = True
    """Whether slots may be stored in 16 bits."""
    saves_gradient_buffer: ClassVar[bool] = False
    """Whether its form for rows on devices in PLSC keeps no gradient of every row; memory reports compare with it."""

    lr: float

    @property
    def counts_updates(self) -> bool:
        """Whether an update depends on how many the row had before."""
        return False

    @property
    def drift(self) -> Drift | None:
        """How rows move at steps that do not touch them; None: they do not."""
        return None

    def scalars(self) -> dict[str, float]:
        """All that it is made from, by name; a flag is 0 or 1."""
        return {one.name: float(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        """Return what :meth:`scalars` is of; what is left out has its default. Raises TypeError, InvalidArgument."""
        return cls(**scalars)

    @abstractmethod
    def updated(self, row: Floats, slots: Floats, gradient: Floats, push: UpdateStep) -> tuple[Floats, Floats]:
        """Return row [..., D] and slots [..., S · D] after one update, computed in ``push.dtype``.

        This is the specification: compiled code has its bits in float32, and float64 is the truth.
        """


def require(condition: bool, message: str) -> None:
    """Raise InvalidArgument with ``message`` unless ``condition``."""
    if not condition:
        raise InvalidArgument(message)


def require_rate(name: str, value: float) -> None:
    """Raise InvalidArgument unless ``value`` is a finite number >= 0."""
    real_number(name, value)
    require(math.isfinite(value) and value >= 0, f"{name} is {value!r}; it must be finite and >= 0")


def flag(name: str, value: float) -> bool:
    """Return a flag that travelled as a number. Raises InvalidArgument unless it is 0 or 1."""
    require(value in (0, 1), f"{name} is {value!r}; it must be 0 or 1")
    return bool(value)
