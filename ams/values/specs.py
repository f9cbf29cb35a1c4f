"""Specification of a table: width, ids, initial values, optimizer, and types in which rows are stored and travel.

Values only, no state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Self, TypedDict

import ml_dtypes
import numpy as np
import numpy.typing as npt

from geartrain.ams.values.admission.rules import Admission, MinCount, Probability, require_admission
from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry, expiry_from_json
from geartrain.ams.values.optimizers.registry import optimizer_of, require_optimizer
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec, require, require_rate
from geartrain.ams.values.text import quoted

DTypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SCALED: dict[str, str] = {"float8_e4m3fn": "bfloat16", "int8": "bfloat16"}
"""8-bit types of rows (float8_e4m3fn) and slots (int8) on ranks, with scales that are powers of two; and the type that
holds such a value exactly, in which they are read, saved and exported."""
SCALE_BYTES, SCALED_BLOCK = 2, 128
"""Bytes of a scale in bfloat16, and slots per scale; a row has one scale."""
MAX_DIM = 65_536
MAX_NAME_LENGTH = 200

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.floating]


def _dtype_named(value: object) -> str:
    """Return the allowed form of ``value``, for example a dtype of torch or numpy: ``its name, 'float16'``."""
    name = getattr(value, "__name__", str(value)).rpartition(".")[2]
    return f"its name, {name!r}" if name in DTYPES else f"one of {', '.join(map(repr, DTYPES))}"


@dataclass(frozen=True)
class Constant:
    """Initial rows whose every value is ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        real_number("value", self.value)
        require(math.isfinite(self.value), f"value is {self.value!r}; it must be finite")


@dataclass(frozen=True)
class Uniform:
    """Initial rows with values uniform on [low, high), a function of (seed, table, id, column) alone."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        real_number("low", self.low)
        real_number("high", self.high)
        require(
            math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high,
            f"[low, high) is [{self.low!r}, {self.high!r}); both must be finite and low <= high",
        )


@dataclass(frozen=True)
class Normal:
    """Initial rows with normal values, a function of (seed, table, id, column) alone."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        real_number("mean", self.mean)
        require(math.isfinite(self.mean), f"mean is {self.mean!r}; it must be finite")
        require_rate("std", self.std)


Initializer = Constant | Uniform | Normal


class TableSettings(TypedDict, total=False):
    """Fields of a :class:`TableSpec` that can change in an existing table; missing ones stay."""

    optimizer: RowOptimizerSpec
    """Optimizer of the table's kind, with the table's values of :attr:`RowOptimizerSpec.fixed`: the other numbers
    change. A push with its own numbers, as of heads and groups, is applied by those."""
    initializer: Initializer
    """Initializer of rows that do not exist yet."""
    admission: Admission | None
    """Admission rule; a new one starts counting anew."""
    expiry: Expiry | None
    """Expiry rule; if rows had no lives before, each counts as seen when the table's clock starts."""
    max_bytes: int | None
    """Memory limit; if it is lowered, rows are evicted at once."""


SETTINGS = tuple(TableSettings.__annotations__)
"""Names of the fields that can change; all others define the table."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Specification of a table that all its users must agree on."""

    name: str
    """1 to 200 printable characters."""
    dim: int
    """Width of a row."""
    optimizer: RowOptimizerSpec
    """Optimizer that pushes apply."""
    num_rows: int | None = None
    """Number of ids of a dense table (ids 0 … num_rows − 1, stored without an index); None: any int64 >= 0, hashed."""
    initializer: Initializer = field(default_factory=Normal)
    """Value of a row that was never pushed or assigned."""
    seed: int = 0
    """Seed of the initial values and of stochastic rounding, an unsigned 64-bit integer."""
    dtype: DTypeName = "float32"
    """Storage type of the rows; arithmetic is float32. Updates round to 16 bits stochastically, assigns to nearest."""
    slot_dtype: DTypeName = "float32"
    """Storage type of the slots (momentum), rounded as the rows are; some optimizers' are float32."""
    admission: Admission | None = None
    """Rule by which ids without a row get one at a push; None: every id. Gradients of the others are dropped, and
    counted. An assign always creates its rows."""
    expiry: Expiry | None = None
    """Rule by which unused rows are removed; None: none."""
    max_bytes: int | None = None
    """Most bytes of all rows of a hashed table, with slots and index; a shard has its share, by its buckets. New rows
    beyond it evict the rows pushed least often, among these the ones not pushed for longest. None: no limit."""
    incarnation: int = field(default=0, compare=False, repr=False)
    """Number of the table among those of its name, given by the scheduler; 0: not known. Not part of the agreement."""
    altered: int = field(default=0, compare=False, repr=False)
    """Cluster version of the last change of settings; 0: since the table was made."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and 0 < len(self.name) <= MAX_NAME_LENGTH and self.name.isprintable(),
            f"table name {quoted(self.name)} must be 1 to {MAX_NAME_LENGTH} printable characters",
        )
        set_field = partial(object.__setattr__, self)  # numpy's integers become Python's
        set_field("dim", integer("dim", self.dim, 1, MAX_DIM))
        if self.num_rows is not None:
            set_field("num_rows", integer("num_rows (None: hashed)", self.num_rows, 1, 2**62 - 1))
        set_field("seed", integer("seed", self.seed, 0, 2**64 - 1))
        require_optimizer(self.optimizer)
        require_admission(self.admission)
        require(
            isinstance(self.initializer, Constant | Uniform | Normal),
            f"initializer is {self.initializer!r}; it must be an instance of Constant, Uniform or Normal of geartrain",
        )
        require(
            self.expiry is None or isinstance(self.expiry, Expiry),
            f"expiry is {self.expiry!r}; it must be a gt.Unseen, a gt.SmallerThan, a gt.Rule or None",
        )
        if self.max_bytes is not None:
            set_field("max_bytes", integer("max_bytes (None: any number)", self.max_bytes, 1, 2**62))
            require(
                self.num_rows is None,
                f"max_bytes is {self.max_bytes} and num_rows {self.num_rows}: rows of dense ids have their places, and "
                "are not evicted; leave one of the two out",
            )
        for label, value in (("dtype", self.dtype), ("slot_dtype", self.slot_dtype)):
            narrow = {"dtype": "float8_e4m3fn", "slot_dtype": "int8"}[label]
            if not isinstance(value, str) or value not in (*DTYPES, narrow):
                raise InvalidArgument(f"{label} is {quoted(value)}; it must be {_dtype_named(value)}")
        require(
            not (self.is_scaled and self.counts_steps),
            f"dtype is {self.dtype!r} and slot_dtype {self.slot_dtype!r}: rows of 8 bits do not move at steps that do "
            "not touch them; use untouched='freeze', or types of 16 bits",
        )
        require(
            self.optimizer.takes_narrow_slots or self.slot_dtype == "float32",
            f"slot_dtype is {self.slot_dtype!r}; {type(self.optimizer).__name__}'s must be 'float32': 16 bits lose "
            "what a step adds",
        )

    @cached_property
    def numpy_dtype(self) -> np.dtype:
        """Type in which rows are read and written: their storage type, or of 8 bits the one that holds them exactly."""
        return DTYPES[SCALED.get(self.dtype, self.dtype)]

    @property
    def is_scaled(self) -> bool:
        """Whether rows or slots have 8 bits and scales: on ranks alone."""
        return self.dtype in SCALED or (self.has_slots and self.slot_dtype in SCALED)

    @property
    def has_slots(self) -> bool:
        """Whether the optimizer keeps slots for each row."""
        return bool(self.optimizer.slots)

    @property
    def slot_dim(self) -> int:
        """Numbers of one row's slots, one slot after the other."""
        return self.optimizer.slot_dim(self.dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row's slots."""
        if self.slot_dtype in SCALED:
            return self.slot_dim + SCALE_BYTES * -(-self.slot_dim // SCALED_BLOCK)
        return self.slot_dim * DTYPES[self.slot_dtype].itemsize

    @property
    def counts_steps(self) -> bool:
        """Whether a push moves the rows outside it too."""
        return self.optimizer.drift is not None

    @property
    def counts_updates(self) -> bool:
        """Whether each row counts its own updates: for the optimizer, or because stochastic rounding to 16 bits draws
        by the count (to 8 bits by the number of the step)."""
        rounds_by_it = self.rounds and not self.counts_steps and not self.is_scaled
        return self.optimizer.counts_updates or rounds_by_it

    @property
    def counts_occurrences(self) -> bool:
        """Whether pushes must carry the occurrences of each id in their batch."""
        return self.admission is not None or self.keeps_lives

    @property
    def asks_for_clock(self) -> bool:
        """Whether pushes must carry the worker's step and time."""
        return self.expiry is not None or self.max_bytes is not None

    @property
    def keeps_lives(self) -> bool:
        """Whether it records when each row was last pushed, and how often."""
        return self.max_bytes is not None or (self.expiry is not None and self.expiry.needs_lives)

    def keeps_same(self, other: TableSpec) -> bool:
        """Return whether both keep the same beside values and slots: counters of admission, and lives."""
        return (self.admission, self.keeps_lives) == (other.admission, other.keeps_lives)

    @property
    def life_bytes(self) -> int:
        """Bytes of that record for one row."""
        return 16 if self.keeps_lives else 0

    @property
    def rounds(self) -> bool:
        """Whether updates of the row or its slots are rounded to 16 bits stochastically."""
        return self.dtype != "float32" or (self.has_slots and self.slot_dtype != "float32")

    @property
    def step_bytes(self) -> int:
        """Bytes of one row's last step, or of its number of updates; 0 where rows keep neither."""
        return 8 if self.counts_steps or self.counts_updates else 0

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row's values and their scale, without slots."""
        return self.dim + SCALE_BYTES if self.dtype in SCALED else self.dim * self.numpy_dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """Return the agreed fields as JSON values."""
        agreed = asdict(self)
        del agreed["incarnation"], agreed["altered"]
        return {
            **agreed,
            "optimizer": {"name": self.optimizer.name, "scalars": self.optimizer.scalars()},
            "initializer": _with_kind(self.initializer),
            "admission": None if self.admission is None else _with_kind(self.admission),
            "expiry": None if self.expiry is None else self.expiry.to_json(),
        }

    @property
    def needs_step_numbers(self) -> bool:
        """Whether a restore needs the step or update counts of rows; those for rounding alone may start anew."""
        return self.counts_steps or self.optimizer.counts_updates

    def unlike(self, other: TableSpec) -> str:
        """Return the fields that differ from ``other``: "dim is 4, not 8; optimizer.lr is 0.1, not 0.2"."""
        return "; ".join(_differences("", self, other))

    def with_settings(self, other: TableSpec, names: Collection[str] = SETTINGS) -> Self:
        """Return this table with the settings ``names`` of ``other``, and its ``altered``; other fields stay.

        If only this table has ``num_rows``, its ``max_bytes`` stays, too.
        """
        settings = {name: getattr(other, name) for name in names}
        if "optimizer" in settings:
            settings["optimizer"] = self.optimizer.with_numbers(other.optimizer)
        if self.num_rows is not None and other.num_rows is None:
            settings.pop("max_bytes", None)
        return replace(self, **settings, altered=other.altered)

    def fixed_unlike(self, other: TableSpec) -> str:
        """Return :meth:`unlike` of the fields that cannot change; empty: the same table, maybe with other settings."""
        return self.with_settings(other).unlike(other)

    def is_same_table(self, other: TableSpec) -> bool:
        """Return whether both can be one table, with other settings."""
        return not self.fixed_unlike(other)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the spec of :meth:`to_dict`. Raises InvalidArgument."""
        try:
            parts = {
                "optimizer": optimizer_of(fields["optimizer"]["name"], fields["optimizer"]["scalars"]),
                "initializer": _of_kind(_INITIALIZERS, fields["initializer"]),
                "admission": fields["admission"] and _of_kind(_ADMISSIONS, fields["admission"]),
                "expiry": fields["expiry"] and expiry_from_json(fields["expiry"]),
            }
            return cls(**{**fields, **parts})
        except (TypeError, KeyError, AttributeError) as exc:
            raise InvalidArgument(f"{dict(fields)!r} is not the specification of a table: {exc!r}") from exc


_INITIALIZERS = {kind.__name__: kind for kind in (Constant, Uniform, Normal)}
_ADMISSIONS = {kind.__name__: kind for kind in (Probability, MinCount)}


def _differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine == theirs:
        return
    if is_dataclass(mine) and type(mine) is type(theirs):
        for known in (known for known in fields(mine) if known.compare):
            name = f"{path}.{known.name}" if path else known.name
            yield from _differences(name, getattr(mine, known.name), getattr(theirs, known.name))
    else:
        yield f"{path} is {mine!r}, not {theirs!r}"


def _with_kind(value: Any) -> dict[str, Any]:
    return {"kind": type(value).__name__, **asdict(value)}


def _of_kind(kinds: Mapping[str, type[Any]], fields: Mapping[str, Any]) -> Any:
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def checked_wire_dtype(wire_dtype: DTypeName | None, table: str, dtype: DTypeName) -> DTypeName | None:
    """Return the type in which rows of a table of ``dtype`` travel for ``wire_dtype``; None: their own.

    Raises InvalidArgument: rows of 16 bits travel as nothing else.
    """
    if wire_dtype is None or wire_dtype == dtype:
        return None
    if not isinstance(wire_dtype, str) or wire_dtype not in DTYPES:
        raise InvalidArgument(f"wire_dtype is {wire_dtype!r}; it must be one of {', '.join(map(repr, DTYPES))}")
    if dtype != "float32":
        raise InvalidArgument(
            f"wire_dtype is {wire_dtype!r}, and the rows of table {table!r} are {dtype}: they travel as they are. "
            "Leave wire_dtype out; it is for tables of float32"
        )
    return wire_dtype
