"""Gradient of a stand-in: one number that represents the row gradients of a module in PyTorch.

It is their 2-norm if they lie in this process's memory, so that a clipper by that norm counts and scales them
correctly. Elsewhere only the rows' own code knows the norm: there it is 1, and only GradScaler may multiply it. Every
other change of gradients that one number cannot represent is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument

_MAY_READ = frozenset(
    ["detach", "clone", "item", "tolist", "to", "cpu", "float", "double", "isfinite", "isnan", "isinf"]
)
_MAY_DESCRIBE = frozenset(
    [
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "__len__",
        "__bool__",
        "__float__",
        "__get__",
        "size",
        "dim",
        "numel",
        "requires_grad_",
        "detach_",
    ]
)
_MAY_SCALE = frozenset(["mul_", "div_", "__imul__", "__itruediv__", "__idiv__", "_foreach_mul_", "_foreach_div_"])
_MAY_MEASURE = frozenset(["norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm", "square", "pow"])
"""Functions allowed with 2 as the order of the norm, or the power."""
_TWOS = (2, "fro", None)
_FORGETS = frozenset(["zero_", "_foreach_zero_"])
_GRAD_SCALER = "_amp_foreach_non_finite_check_and_unscale_"
_SAME_MEMORY = frozenset({"detach", "__get__"})
_ROWS_PER_SUM = 4096
LEAST_SQUARES = 1e-24
"""Sum of squares below which float32 may have lost terms."""


class StandInGradient(Tensor):
    """Gradient [1] of the stand-in for the rows of ``table``: their 2-norm if it ``is_norm``, else 1.

    GradScaler may unscale it, zeroing it drops the row gradients, and the norm may be measured as a 2-norm and
    multiplied. Any other operation raises InvalidArgument: one number cannot represent the effect of a clipper by
    value, or by another norm, on each row.
    """

    table: str
    is_norm: bool
    forget: Callable[[], None]
    is_unscaled_elsewhere: bool
    """Whether GradScaler must skip it, because it unscales the rows by their own optimizer."""

    @staticmethod
    def of(
        gradient: Tensor, table: str, forget: Callable[[], None], *, is_norm: bool, is_unscaled_elsewhere: bool = False
    ) -> StandInGradient:
        """Return ``gradient`` [1] in the same memory; ``forget`` drops the row gradients."""
        guarded: StandInGradient = gradient.as_subclass(StandInGradient)
        guarded.table, guarded.is_norm, guarded.forget = table, is_norm, forget
        guarded.is_unscaled_elsewhere = is_unscaled_elsewhere
        return guarded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow functions with a known effect on the rows."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        guarded = [item for item in _flat([args, *kwargs.values()]) if isinstance(item, cls)]
        if name in _FORGETS and "out" not in kwargs:
            for item in guarded:
                item.forget()
        elif name == _GRAD_SCALER:
            args = ([item for item in args[0] if not (isinstance(item, cls) and item.is_unscaled_elsewhere)], *args[1:])
        elif name not in _MAY_READ and name not in _MAY_DESCRIBE:
            for item in guarded:
                if not (item.is_norm and (_scales(name, item, args) or _measures(name, args, kwargs))):
                    raise not_for_clippers(item.table, name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name in _SAME_MEMORY and isinstance(result, Tensor) and isinstance(args[0], cls):
            mine: StandInGradient = args[0]
            return cls.of(
                result,
                mine.table,
                mine.forget,
                is_norm=mine.is_norm,
                is_unscaled_elsewhere=mine.is_unscaled_elsewhere,
            )
        return result


def _scales(name: str, gradient: Tensor, args: Any) -> bool:
    """Return whether it is only multiplied, and is no factor itself."""
    return name in _MAY_SCALE and all(item is not gradient for item in _flat(list(args[1:])))


def _measures(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether its 2-norm, or its square, is computed."""
    kinds = [kwargs[key] for key in ("ord", "p", "exponent") if key in kwargs] or list(args[1:2]) or [None]
    return name in _MAY_MEASURE and kinds[0] in _TWOS


def not_for_clippers(table: str, what: str) -> InvalidArgument:
    """Return the error for an operation on a stand-in's gradient that would not reach the rows correctly."""
    return InvalidArgument(
        f"{what} met the stand-in gradient of the rows of table {table!r}, which is one number: it can be scaled, or "
        "measured as a 2-norm, where one process pulls the rows at once, and by torch.amp.GradScaler alone where they "
        "are streamed, hosted, on ranks or summed over ranks. Clip with geartrain.clip_grad_norm_(parameters, rows, "
        "max_norm), which is exact everywhere; to clip single values of rows there is no way"
    )


def _flat(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [item for value in values for item in _flat(value)]
    return [values]


def squared_sum(values_ND: Tensor) -> Tensor:
    """Return Σ v² (0-dim, float64) of [N, D] of any floating type, on its device; reads them once."""
    if values_ND.device.type != "cpu":
        lengths_N: Tensor = torch.linalg.vector_norm(values_ND, dim=1, dtype=torch.float64)
        return lengths_N.square_().sum()
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    is_narrow = values_ND.dtype not in (torch.float32, torch.float64)
    rows = _ROWS_PER_SUM // 8 if is_narrow else _ROWS_PER_SUM
    room_ND = values_ND.new_empty((rows, *values_ND.shape[1:]), dtype=torch.float32) if is_narrow else None
    for part in torch.split(values_ND, rows):
        wide = part if room_ND is None else room_ND[: len(part)].copy_(part)  # one copy: freed ones stay in the heap
        squares = torch.linalg.vector_norm(wide, dim=1).double().square_().sum()
        if not LEAST_SQUARES < float(squares) < torch.inf:
            squares = torch.linalg.vector_norm(wide, dim=1, dtype=torch.float64).square_().sum()
        total += squares
    return total
