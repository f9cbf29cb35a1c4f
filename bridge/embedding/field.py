"""Input features of a model, and the specs of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn

from geartrain.ams.kernels.embedding import POOLINGS, PoolingName
from geartrain.ams.values.admission.rules import Admission
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.optimizers.registry import Adagrad, RowOptimizerSpec
from geartrain.ams.values.specs import DTypeName, Initializer, Normal, TableSpec
from geartrain.ams.values.text import counted, quoted

Where = Literal["pull", "hosted"]
DEFAULT_OPTIMIZER = Adagrad(lr=0.05)
"""Makes large steps for rare ids; its slots take as much memory as the rows."""


@dataclass(frozen=True)
class Field:
    """An input feature: a vector for each bag of its ids, or for each id.

    Fields that name the same ``table`` share its rows; a setting of the table needs to be given by one of them only.
    """

    name: str
    """Key of the ids in a batch, and of the vectors in the result."""
    dim: int | None = None
    """Width of the vectors, >= 1; needed once for each table."""
    table: str | None = None
    """Table of its rows; None: one of the field's name. The group's name is its prefix: ``ctr/item``."""
    pooling: PoolingName | None = "sum"
    """Pooling of a bag of ids: "sum", "mean", "sqrtn" (sum / √count), "max"; None: a vector for each id.
    With weights w of the ids: Σ w·x, Σ w·x / Σ w, Σ w·x / √Σ w². An empty bag gives 0. With "max" the gradient goes to
    the first of equal largest values."""
    where: Where = "pull"
    """Place of pooling. "pull": here, and rows are sent; "hosted": in the shards, and one vector a bag is sent, which
    pays for long bags. Both give the same up to rounding; "hosted" needs pooling "sum", "mean" or "sqrtn"."""
    features: nn.Module | None = None
    """Module that computes the vectors, in place of a table: a :class:`geartrain.SlowGear`, whose module computes them
    from an image of each id and receives their gradients; or a module of your own: ids int64 [N] in, [N, dim] out,
    with ``dim`` and the ``row_update`` of a :class:`~geartrain.bridge.rows.pending.RowModule`. Settings of a table are
    refused beside it."""
    padding_id: int | None = None
    """Id of padding: skipped in pooling, a zero vector without pooling."""
    optimizer: RowOptimizerSpec | None = None
    """Optimizer of the table; None: the group's, or Adagrad at 0.05."""
    initializer: Initializer | None = None
    """Value of a row that was never pushed; None: normal, std 0.01."""
    num_rows: int | None = None
    """Ids are 0 … num_rows − 1; None: any id >= 0, and the table grows as they come."""
    dtype: DTypeName | None = None
    """Storage type of the rows; None: float32."""
    slot_dtype: DTypeName | None = None
    """Storage type of the optimizer's state of each row; None: float32."""
    admission: Admission | None = None
    """Rule for the ids that get a row at a push; None: every id."""
    expiry: Expiry | None = None
    """Rule for the rows that are removed as unused; None: none."""
    max_bytes: int | None = None
    """Memory limit of the table's rows with slots and index; None: no limit. If new rows need room, the least often
    pushed rows are evicted first."""

    def __post_init__(self) -> None:
        """Check the settings. Raises InvalidArgument, naming the field."""
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(
                f"the name of a field is {quoted(self.name)}; it must be a string, as gt.Field('user', dim=16)"
            )
        if self.pooling not in POOLINGS:
            names = ", ".join(repr(pooling) for pooling in POOLINGS)
            raise InvalidArgument(
                f"pooling of field {self.name!r} is {quoted(self.pooling)}; it must be one of {names}"
            )
        if self.where not in ("pull", "hosted"):
            raise InvalidArgument(
                f"where of field {self.name!r} is {quoted(self.where)}; it must be 'pull' or 'hosted'"
            )
        if self.where == "hosted" and self.pooling in (None, "max"):
            raise InvalidArgument(
                f"field {self.name!r} is hosted and has pooling {self.pooling!r}: a shard answers the sum of its part "
                "of a bag. Choose 'sum', 'mean' or 'sqrtn', or leave where='pull'"
            )
        if self.features is not None:
            self._check_features()
        if self.padding_id is not None:
            object.__setattr__(
                self, "padding_id", integer(f"padding_id of field {self.name!r}", self.padding_id, -(2**63), 2**63 - 1)
            )

    def _check_features(self) -> None:
        dim = getattr(self.features, "dim", None)
        if not isinstance(dim, int) or not hasattr(self.features, "row_update"):
            raise InvalidArgument(
                f"features of field {self.name!r} are {quoted(self.features)}; they must be a gt.SlowGear, or a module "
                "with dim and row_update"
            )
        given = [name for name in ("table", *_OF_TABLE) if name != "dim" and getattr(self, name) is not None]
        if given or self.where != "pull" or self.dim not in (None, dim):
            what = given[0] if given else "where" if self.where != "pull" else "dim"
            raise InvalidArgument(
                f"field {self.name!r} has features and {what}={quoted(getattr(self, what))}; its vectors, {dim} wide, "
                "are in no table"
            )

    @property
    def table_name(self) -> str:
        """Name of the table, without the group's prefix."""
        return self.name if self.table is None else self.table


_OF_TABLE = ("dim", "optimizer", "initializer", "num_rows", "dtype", "slot_dtype", "admission", "expiry", "max_bytes")
assert set(_OF_TABLE) < {field.name for field in fields(Field)}


def table_specs(
    members: Sequence[Field], names: Mapping[str, str], optimizer: RowOptimizerSpec | None, seed: int
) -> dict[str, TableSpec]:
    """Return the specs of the fields' tables by :attr:`Field.table_name`, in order of first appearance.

    ``names`` maps these to names in the cluster. Raises InvalidArgument for names that occur twice, missing settings,
    and fields that contradict each other.
    """
    if not members:
        raise InvalidArgument("a group of embeddings needs at least one field: [gt.Field('user', dim=16)]")
    known = [member.name for member in members]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice:
        raise InvalidArgument(
            f"{counted(len(twice), 'field')} occur twice: {', '.join(map(repr, twice))}; name each once"
        )
    if not names:
        raise InvalidArgument(
            f"none of the fields {', '.join(map(repr, known))} has a table; a group needs one that has, and a "
            "gt.SlowGear by itself needs no group: image(ids)"
        )
    return {table: _spec(table, names[table], members, optimizer, seed) for table in names}


def _spec(table: str, name: str, members: Sequence[Field], optimizer: RowOptimizerSpec | None, seed: int) -> TableSpec:
    sharing = [member for member in members if member.features is None and member.table_name == table]
    given: dict[str, object] = {}
    by: dict[str, str] = {}
    for field in sharing:
        for setting in _OF_TABLE:
            value = getattr(field, setting)
            if value is None:
                continue
            if setting in given and given[setting] != value:
                raise InvalidArgument(
                    f"fields {by[setting]!r} and {field.name!r} share table {table!r} and differ in {setting}: "
                    f"{given[setting]!r} and {value!r}; say it in one of them, or give them tables of their own"
                )
            given[setting], by[setting] = value, field.name
    who = ", ".join(repr(item.name) for item in sharing)
    if "dim" not in given:
        raise InvalidArgument(
            f"no field of table {table!r} ({who}) has a dim; give one: gt.Field({sharing[0].name!r}, dim=16)"
        )
    given.setdefault("optimizer", DEFAULT_OPTIMIZER if optimizer is None else optimizer)
    given.setdefault("initializer", Normal())
    return TableSpec(name=name, seed=seed, **given)  # type: ignore[arg-type]
