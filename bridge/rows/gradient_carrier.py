"""What PyTorch sees of row gradients: the gradient of a carrier, a parameter of one element that stands for the rows.

Where the row gradients lie in this process's memory it is their norm, so that any clipper counts and scales them as it
should. Elsewhere nobody but the rows' own code knows the norm: there it is a :class:`FactorAlone`, which GradScaler may
multiply and nobody else may use.
"""

from __future__ import annotations

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
    ]
)
_GRAD_SCALER = "_amp_foreach_non_finite_check_and_unscale_"
_SAME_MEMORY = frozenset({"detach", "__get__"})
_ROWS_PER_SUM = 4096
_LEAST_SQUARES = 1e-24
"""Below this float32 may have lost squares altogether."""


class FactorAlone(Tensor):
    """A factor on row gradients whose norm is not known here: 1, multiplied by what GradScaler makes of it.

    Any other operation on it raises InvalidArgument: a clipper would take 1 for the norm of the rows.
    """

    table: str

    @staticmethod
    def of(factor: Tensor, table: str) -> FactorAlone:
        """``factor`` [1], the same memory, for the rows of ``table``."""
        alone: FactorAlone = factor.as_subclass(FactorAlone)
        alone.table = table
        return alone

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let GradScaler and those who only look pass."""
        del types
        name = getattr(func, "__name__", "")
        if name != _GRAD_SCALER and name not in _MAY_READ and name not in _MAY_DESCRIBE:
            tables = [item.table for item in _flat([args, kwargs]) if isinstance(item, cls)]
            raise not_for_clippers(tables[0] if tables else "", name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in _SAME_MEMORY and isinstance(result, Tensor) and isinstance(args[0], cls):
            return cls.of(result, args[0].table)
        return result


def not_for_clippers(table: str, what: str) -> InvalidArgument:
    """The error for whoever uses such a factor as if it were a gradient."""
    return InvalidArgument(
        f"{what} met the stand-in gradient of the rows of table {table!r}, which are streamed, hosted, on ranks or "
        "summed over ranks: their norm is not in it. Clip with geartrain.clip_grad_norm_(parameters, rows, max_norm); "
        "only torch.amp.GradScaler may change it"
    )


def _flat(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [item for value in values for item in _flat(value)]
    return [values]


def squared_sum(values_ND: Tensor) -> Tensor:
    """Σ v² (0-dim, float64) of [N, D] of any floating type, on its device; reads them once."""
    if values_ND.device.type != "cpu":
        lengths_N: Tensor = torch.linalg.vector_norm(values_ND, dim=1, dtype=torch.float64)
        return lengths_N.square_().sum()
    total = torch.zeros((), dtype=torch.float64)
    for part in torch.split(values_ND, _ROWS_PER_SUM):
        wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
        squares = torch.linalg.vector_norm(wide, dim=1).double().square_().sum()
        if not _LEAST_SQUARES < float(squares) < torch.inf:
            squares = torch.linalg.vector_norm(wide, dim=1, dtype=torch.float64).square_().sum()
        total += squares
    return total
