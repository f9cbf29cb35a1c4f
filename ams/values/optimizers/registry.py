"""Registry of row optimizers, by name.

A new one is a class beside these and a line in :data:`OPTIMIZERS`; a file in ``optimizers/`` of the core and a line in
its ``registry.cpp``; and a function in ``bridge/kernels/optimizers.py`` for rows on ranks and a line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.adagrad import Adagrad as Adagrad
from geartrain.ams.values.optimizers.adagrad import RowWiseAdagrad as RowWiseAdagrad
from geartrain.ams.values.optimizers.adam import Adam as Adam
from geartrain.ams.values.optimizers.adam import AdamW as AdamW
from geartrain.ams.values.optimizers.adam import RowWiseAdam as RowWiseAdam
from geartrain.ams.values.optimizers.ftrl import FTRL as FTRL
from geartrain.ams.values.optimizers.momentum import SGD as SGD
from geartrain.ams.values.optimizers.momentum import Momentum as Momentum
from geartrain.ams.values.optimizers.momentum import SparseMomentum as SparseMomentum
from geartrain.ams.values.optimizers.rmsprop import RMSProp as RMSProp
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec as RowOptimizerSpec
from geartrain.ams.values.text import quoted

OPTIMIZERS: dict[str, type[RowOptimizerSpec]] = {
    kind.name: kind
    for kind in (SGD, Momentum, SparseMomentum, Adam, Adagrad, AdamW, RowWiseAdagrad, RowWiseAdam, RMSProp, FTRL)
}

SETTINGS = frozenset(setting.name for kind in OPTIMIZERS.values() for setting in fields(kind))  # type: ignore[arg-type]
"""Names of all constructor arguments of all optimizers."""


def optimizer_of(name: str, scalars: Mapping[str, float]) -> RowOptimizerSpec:
    """Return the optimizer of this name, made from numbers; missing ones have their defaults.

    Raises InvalidArgument.
    """
    if name not in OPTIMIZERS:
        raise InvalidArgument(f"there is no optimizer {quoted(name)}; there are {', '.join(OPTIMIZERS)}")
    try:
        return OPTIMIZERS[name].from_scalars(scalars)
    except TypeError as exc:
        numbers = quoted(dict(scalars))
        raise InvalidArgument(f"optimizer {name!r} cannot be made from {numbers}: {exc}") from exc


def optimizer_with(optimizer: RowOptimizerSpec, settings: Mapping[str, Any]) -> RowOptimizerSpec:
    """Return ``optimizer`` with the values of its constructor arguments in ``settings``; other names are ignored.

    One-element tensors stand for their numbers. Raises InvalidArgument for a value outside its range, one that cannot
    change (:attr:`RowOptimizerSpec.fixed`), and one that only another optimizer has.
    """
    values: list[tuple[str, Any, type]] = []
    for name in settings.keys() & SETTINGS:
        value = settings[name]
        if isinstance(value, tuple | list):
            value = tuple([number.item() if hasattr(number, "item") else number for number in value])
        elif hasattr(value, "item"):
            value = value.item()
        values.append((name, value, type(value)))
    try:
        return _made(optimizer, tuple(values))
    except TypeError:  # an unhashable value is no number: the constructor names it
        return _made.__wrapped__(optimizer, tuple(values))


@lru_cache(maxsize=256)
def _made(optimizer: RowOptimizerSpec, values: tuple[tuple[str, Any, type], ...]) -> RowOptimizerSpec:
    """Implement :func:`optimizer_with`, cached because every step calls it. The types tell True from 1."""
    own = optimizer.settings()
    for name, value, _ in values:
        if name not in own:
            raise InvalidArgument(f"{name} is {quoted(value)}, but {optimizer.name} has none; it has {', '.join(own)}")
    changed = replace(optimizer, **{name: value for name, value, _ in values})  # type: ignore[type-var]
    optimizer.scalars_of_push(changed)
    return changed


def require_optimizer(value: object) -> None:
    """Raise InvalidArgument unless ``value`` is one of :data:`OPTIMIZERS`."""
    if not isinstance(value, tuple(OPTIMIZERS.values())):
        *others, last = (kind.__name__ for kind in OPTIMIZERS.values())
        kinds = f"{', '.join(others)} or {last}"
        raise InvalidArgument(f"optimizer is {value!r}; it must be an instance of {kinds}, all of geartrain")
