"""What an input feature of a model is, and the table that its ids have rows in."""

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
"""Its steps are long for ids that are seldom seen, and its slots as many as the rows."""


@dataclass(frozen=True)
class Field:
    """An input feature: a vector for each bag of its ids, or for each id.

    Fields that name the same ``table`` share its rows; what they do not say of it they take from the one that does.
    """

    name: str
    """The key in a batch, and of the vectors."""
    dim: int | None = None
    """Width of the vectors, >= 1; needed once for each table."""
    table: str | None = None
    """Where its rows are; None: in a table of its own name. The group's name comes before it: ``ctr/item``."""
    pooling: PoolingName | None = "sum"
    """Of a bag of ids: "sum", "mean", "sqrtn" (the sum over the root of how many), "max"; None: a vector for each id.
    With weights w of the ids: Σ w·x, Σ w·x / Σ w, Σ w·x / √Σ w². Of an empty bag it is 0."""
    where: Where = "pull"
    """Where ids are pooled: "pull": here, the rows travel; "hosted": beside the rows, and one vector a bag travels,
    which pays where bags are long. The same to rounding; with pooling "sum", "mean" or "sqrtn"."""
    features: nn.Module | None = None
    """What computes the vectors, in the place of a table: a :class:`geartrain.SlowGear`, whose module makes them of an
    image of each id, and gets their gradients; or a module of one's own: ids int64 [N] in, [N, dim] out, with ``dim``
    and the ``row_update`` of a :class:`~geartrain.bridge.rows.pending.RowModule`. Nothing of a table is said beside it.
    Of equal largest values under pooling "max" each has its share of the gradient."""
    padding_id: int | None = None
    """An id that stands for none: passed over, and a zero vector where ids are not pooled."""
    optimizer: RowOptimizerSpec | None = None
    """Of the table; None: the group's, or Adagrad at 0.05."""
    initializer: Initializer | None = None
    """Value of a row that was never pushed; None: normal, std 0.01."""
    num_rows: int | None = None
    """Ids are 0 … num_rows − 1; None: any id >= 0, and the table grows as they come."""
    dtype: DTypeName | None = None
    """Storage type of the rows; None: float32."""
    slot_dtype: DTypeName | None = None
    """Storage type of the optimizer's state of each row; None: float32."""
    admission: Admission | None = None
    """Which ids without a row get one at a push; None: every id."""
    expiry: Expiry | None = None
    """Which rows of the table go when nobody needs them; None: none does by itself."""
    max_bytes: int | None = None
    """Of memory for all rows of the table, with their slots and index; None: any number. Rows that were pushed least
    often go first where new ones need room."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument that names the field."""
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
        """Of the table, without the group's."""
        return self.name if self.table is None else self.table


_OF_TABLE = ("dim", "optimizer", "initializer", "num_rows", "dtype", "slot_dtype", "admission", "expiry", "max_bytes")
assert set(_OF_TABLE) < {field.name for field in fields(Field)}


def table_specs(
    members: Sequence[Field], names: Mapping[str, str], optimizer: RowOptimizerSpec | None, seed: int
) -> dict[str, TableSpec]:
    """The tables of the fields by :attr:`Field.table_name`, in order of first appearance; ``names`` are those in the
    cluster. Raises InvalidArgument for names that occur twice, what is missing, and fields that contradict each other.
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
