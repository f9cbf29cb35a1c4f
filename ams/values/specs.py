"""What a table is: its width, its ids, its initial values and how a push changes its rows. Values only, no state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

DTypeName = Literal["float32", "float16", "bfloat16"]
Untouched = Literal["freeze", "elapsed"]
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MAX_DIM = 65_536
MAX_NAME_LENGTH = 200

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.floating]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidArgument(message)


def _require_rate(name: str, value: float) -> None:
    real_number(name, value)
    _require(math.isfinite(value) and value >= 0, f"{name} is {value!r}; it must be finite and >= 0")


@dataclass(frozen=True)
class SGD:
    """w ← w − lr · (g + weight_decay · w)."""

    lr: float
    """Learning rate; a push may carry another one."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""

    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _require_rate("lr", self.lr)
        _require_rate("weight_decay", self.weight_decay)


@dataclass(frozen=True)
class Momentum:
    """v ← momentum · v + g + weight_decay · w;  w ← w − lr · v (nesterov: w ← w − lr · (g + momentum · v)).

    The form of ``torch.optim.SGD``, for tables all of whose rows are pushed each step.
    """

    lr: float
    """Learning rate; a push may carry another one."""
    momentum: float = 0.9
    """Decay μ of the velocity, in [0, 1)."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    nesterov: bool = False
    """Look ahead along the velocity."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _require_rate("lr", self.lr)
        _require_rate("weight_decay", self.weight_decay)
        real_number("momentum", self.momentum)
        _require(0 <= self.momentum < 1, f"momentum is {self.momentum!r}; it must lie in [0, 1)")


@dataclass(frozen=True)
class SparseMomentum:
    """Momentum on the rows of a push: v ← momentum · v + g + weight_decay · w;  w ← w − lr · v (PLSC, section 4).

    ``untouched="freeze"`` is the lazy form: a row outside the push neither moves nor decays.

    ``untouched="elapsed"`` equals dense momentum: at every push each row of the table, even one that was never written,
    decays and moves on by its momentum. It is caught up when it is read or pushed next, from its last step and the
    learning rates since then, so that a step costs what its own rows cost. Memory: 8 bytes more per row, for its last
    step, and 4 per step remembered (at most about 20,000 per table and shard; no gradient buffer, no pass over all
    rows). Traffic: every push goes to every shard, if need be empty, to count as a step there. A row that would move
    beyond the range of its type stays at its end.
    """

    lr: float
    """Learning rate; a push may carry another one."""
    momentum: float = 0.9
    """Decay μ of the velocity, in [0, 1)."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    untouched: Untouched = "freeze"
    """What happens to rows outside a push."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _require_rate("lr", self.lr)
        _require_rate("weight_decay", self.weight_decay)
        real_number("momentum", self.momentum)
        _require(0 <= self.momentum < 1, f"momentum is {self.momentum!r}; it must lie in [0, 1)")
        _require(
            self.untouched in ("freeze", "elapsed"),
            f"untouched is {self.untouched!r}; it must be 'freeze' or 'elapsed'",
        )


@dataclass(frozen=True)
class Adam:
    """m ← β₁ m + (1 − β₁) d;  v ← β₂ v + (1 − β₂) d²;  w ← w − lr · m̂ / (√v̂ + eps), with d = g + weight_decay · w.

    m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ), where t is the row's own number of updates: on a table all of whose rows
    are pushed each step this is ``torch.optim.Adam`` (Kingma and Ba, ICLR 2015, algorithm 1; weight decay as L2), and a
    row outside a push neither moves nor decays. Memory: two slots of float32 and 8 bytes per row. A push whose second
    moments would leave the range of float32 (gradients above about 5e20) is refused like any other overflow.
    """

    lr: float = 1e-3
    """Learning rate; a push may carry another one."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays of the first and second moments, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment; at least 1.2e-38, so that a zero gradient divides by no zero."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""

    slots: ClassVar[tuple[str, ...]] = ("first moment", "second moment")

    def __post_init__(self) -> None:
        _require_rate("lr", self.lr)
        _require_rate("weight_decay", self.weight_decay)
        _require_rate("eps", self.eps)
        _require(2.0**-126 <= self.eps < 2.0**127, f"eps is {self.eps!r}; it must lie in [1.2e-38, 1.7e38)")
        _require(
            isinstance(self.betas, tuple | list) and len(self.betas) == 2,
            f"betas is {self.betas!r}; it must be a pair such as (0.9, 0.999)",
        )
        for beta in self.betas:
            real_number("a beta", beta)
            _require(0 <= beta < 1, f"betas is {self.betas!r}; each must lie in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON knows lists only


RowOptimizerSpec = SGD | Momentum | SparseMomentum | Adam


@dataclass(frozen=True)
class Constant:
    """Every value of a new row is ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        real_number("value", self.value)
        _require(math.isfinite(self.value), f"value is {self.value!r}; it must be finite")


@dataclass(frozen=True)
class Uniform:
    """Values of a new row are uniform on [low, high), a function of (seed, table, id, column) alone."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        real_number("low", self.low)
        real_number("high", self.high)
        _require(
            math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high,
            f"[low, high) is [{self.low!r}, {self.high!r}); both must be finite and low <= high",
        )


@dataclass(frozen=True)
class Normal:
    """Values of a new row are normal, a function of (seed, table, id, column) alone."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        real_number("mean", self.mean)
        _require(math.isfinite(self.mean), f"mean is {self.mean!r}; it must be finite")
        _require_rate("std", self.std)


Initializer = Constant | Uniform | Normal


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Everything that two parties must agree on to share a table."""

    name: str
    """1 to 200 printable characters."""
    dim: int
    """Width of a row."""
    optimizer: RowOptimizerSpec
    """How a push changes the rows."""
    num_rows: int | None = None
    """Number of ids of a dense table (ids 0 … num_rows − 1, stored without an index); None: any int64 >= 0, hashed."""
    initializer: Initializer = field(default_factory=Normal)
    """Value of a row that was never pushed or assigned."""
    seed: int = 0
    """Seed of the initial values and of stochastic rounding, an unsigned 64-bit integer."""
    dtype: DTypeName = "float32"
    """Storage type of the rows; arithmetic is float32. An update is rounded to 16 bits by chance, what is assigned to
    the nearest."""
    slot_dtype: DTypeName = "float32"
    """Storage type of the slots (momentum), rounded as the rows are; Adam's are float32."""
    incarnation: int = field(default=0, compare=False, repr=False)
    """Which table of this name it is, as the scheduler numbers them; 0: not known. Not part of what is agreed on."""

    def __post_init__(self) -> None:
        _require(
            isinstance(self.name, str) and 0 < len(self.name) <= MAX_NAME_LENGTH and self.name.isprintable(),
            f"table name {quoted(self.name)} must be 1 to {MAX_NAME_LENGTH} printable characters",
        )
        set_field = partial(object.__setattr__, self)  # numpy's integers become Python's
        set_field("dim", integer("dim", self.dim, 1, MAX_DIM))
        if self.num_rows is not None:
            set_field("num_rows", integer("num_rows (None: hashed)", self.num_rows, 1, 2**62 - 1))
        set_field("seed", integer("seed", self.seed, 0, 2**64 - 1))
        _require(
            isinstance(self.optimizer, RowOptimizerSpec),
            f"optimizer is {self.optimizer!r}; it must be an instance of SGD, Momentum, SparseMomentum or Adam, all of "
            "geartrain",
        )
        _require(
            isinstance(self.initializer, Constant | Uniform | Normal),
            f"initializer is {self.initializer!r}; it must be an instance of Constant, Uniform or Normal of geartrain",
        )
        for label, value in (("dtype", self.dtype), ("slot_dtype", self.slot_dtype)):
            _require(value in DTYPES, f"{label} is {value!r}; it must be one of {', '.join(DTYPES)}")

        _require(
            not isinstance(self.optimizer, Adam) or self.slot_dtype == "float32",
            f"slot_dtype is {self.slot_dtype!r}; Adam's must be 'float32': 16 bits lose what a step adds to moments",
        )

    @property
    def numpy_dtype(self) -> np.dtype:
        """Storage type of the rows as a numpy dtype."""
        return DTYPES[self.dtype]

    @property
    def has_slots(self) -> bool:
        """Whether the optimizer keeps slots for each row."""
        return bool(self.optimizer.slots)

    @property
    def slot_dim(self) -> int:
        """Numbers of one row's slots, one slot after the other."""
        return self.dim * len(self.optimizer.slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row's slots."""
        return self.slot_dim * DTYPES[self.slot_dtype].itemsize

    @property
    def counts_steps(self) -> bool:
        """Whether a push moves the rows outside it too."""
        return isinstance(self.optimizer, SparseMomentum) and self.optimizer.untouched == "elapsed"

    @property
    def counts_updates(self) -> bool:
        """Whether each row counts its own updates: Adam needs the number, and rounding to 16 bits draws by it."""
        return isinstance(self.optimizer, Adam) or (self.rounds and not self.counts_steps)

    @property
    def rounds(self) -> bool:
        """Whether an update is rounded to 16 bits, the row's or its slots', by chance."""
        return self.dtype != "float32" or (self.has_slots and self.slot_dtype != "float32")

    @property
    def step_bytes(self) -> int:
        """Bytes of the number of one row's last step, or of its updates; 0 where rows keep neither."""
        return 8 if self.counts_steps or self.counts_updates else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's values, without slots."""
        return self.dim * self.numpy_dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """All that is agreed on as JSON values; optimizer and initializer with their ``kind``."""
        agreed = asdict(self)
        del agreed["incarnation"]
        return {
            **agreed,
            "optimizer": {"kind": type(self.optimizer).__name__, **_as_json(asdict(self.optimizer))},
            "initializer": {"kind": type(self.initializer).__name__, **asdict(self.initializer)},
        }

    def unlike(self, other: TableSpec) -> str:
        """Say in which fields it differs from ``other``: "dim is 4, not 8; optimizer.lr is 0.1, not 0.2"."""
        return "; ".join(_differences("", self, other))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what :meth:`to_dict` wrote. Raises InvalidArgument."""
        try:
            return cls(
                **{
                    **fields,
                    "optimizer": _of_kind(_OPTIMIZERS, fields["optimizer"]),
                    "initializer": _of_kind(_INITIALIZERS, fields["initializer"]),
                }
            )
        except (TypeError, KeyError, AttributeError) as exc:
            raise InvalidArgument(f"{dict(fields)!r} is not the specification of a table: {exc!r}") from exc


_OPTIMIZERS = {kind.__name__: kind for kind in (SGD, Momentum, SparseMomentum, Adam)}
_INITIALIZERS = {kind.__name__: kind for kind in (Constant, Uniform, Normal)}


def _differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    if mine == theirs:
        return
    if is_dataclass(mine) and type(mine) is type(theirs):
        for one in (one for one in fields(mine) if one.compare):
            name = f"{path}.{one.name}" if path else one.name
            yield from _differences(name, getattr(mine, one.name), getattr(theirs, one.name))
    else:
        yield f"{path} is {mine!r}, not {theirs!r}"


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _of_kind(kinds: Mapping[str, type[Any]], fields: Mapping[str, Any]) -> Any:
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})
