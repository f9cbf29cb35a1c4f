"""Every optimizer of rows there is, by name.

A new one is a file beside this one and a line in :data:`OPTIMIZERS`; a file in ``optimizers/`` of the core and a line
in its ``registry.cpp``; and a file beside the tensor operations for rows on ranks and a line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.optimizers.adam import Adam
from geartrain.ams.values.optimizers.adamw import AdamW
from geartrain.ams.values.optimizers.momentum import Momentum
from geartrain.ams.values.optimizers.sgd import SGD
from geartrain.ams.values.optimizers.sparse_momentum import SparseMomentum
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec
from geartrain.ams.values.text import quoted

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Momentum",
    "RowOptimizerSpec",
    "SparseMomentum",
    "optimizer_from_json",
    "optimizer_of",
    "optimizer_to_json",
    "require_optimizer",
]

OPTIMIZERS: dict[str, type[RowOptimizerSpec]] = {
    kind.name: kind for kind in (SGD, Momentum, SparseMomentum, Adam, Adagrad, AdamW)
}


def optimizer_of(name: str, scalars: Mapping[str, float]) -> RowOptimizerSpec:
    """Return the optimizer of this name, made from numbers; what is left out has its default.

    Raises InvalidArgument.
    """
    if name not in OPTIMIZERS:
        raise InvalidArgument(f"there is no optimizer {quoted(name)}; there are {', '.join(OPTIMIZERS)}")
    try:
        return OPTIMIZERS[name].from_scalars(scalars)
    except TypeError as exc:
        numbers = quoted(dict(scalars))
        raise InvalidArgument(f"optimizer {name!r} cannot be made from {numbers}: {exc}") from exc


def require_optimizer(value: object) -> None:
    """Raise InvalidArgument unless ``value`` is one of :data:`OPTIMIZERS`."""
    if not isinstance(value, tuple(OPTIMIZERS.values())):
        *others, last = (kind.__name__ for kind in OPTIMIZERS.values())
        kinds = f"{', '.join(others)} or {last}"
        raise InvalidArgument(f"optimizer is {value!r}; it must be an instance of {kinds}, all of geartrain")


def optimizer_to_json(optimizer: RowOptimizerSpec) -> dict[str, Any]:
    """Return JSON values for :func:`optimizer_from_json`."""
    return {"name": optimizer.name, "scalars": optimizer.scalars()}


def optimizer_from_json(fields: Mapping[str, Any]) -> RowOptimizerSpec:
    """Return the optimizer of these JSON values. Raises InvalidArgument, KeyError, TypeError.

    Snapshots and states of schedulers before names and scalars have the class and its fields: ``{"kind": "SGD", "lr":
    0.1, "weight_decay": 0.0}``.
    """
    if "kind" not in fields:
        return optimizer_of(fields["name"], fields["scalars"])
    kinds = {kind.__name__: kind for kind in OPTIMIZERS.values()}
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})
