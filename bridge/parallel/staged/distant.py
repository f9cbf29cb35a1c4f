"""Placeholders, on the ranks of the first stage, for layers of later stages and their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.bridge.parallel.split.logits import SplitLogits

MAX_DIMENSIONS = 4


def rows_to_send(value: Any, giver: str) -> Tensor:
    """Return the tensor [S, …] that a stage sends to the next one; split logits are made whole. Raises InvalidRows."""
    if isinstance(value, SplitLogits):
        value = value.whole()
    if not isinstance(value, Tensor) or not 2 <= value.ndim <= MAX_DIMENSIONS or not value.dtype.is_floating_point:
        given = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidRows(
            f"{giver} is {given}; between stages goes one floating tensor [S, …] of 2 to {MAX_DIMENSIONS} dimensions, "
            "samples first. Pool or flatten (nn.Flatten()) in the stage before, or join both stages"
        )
    return value


class DistantOutput:
    """Placeholder for the later stages' output for this rank's samples; the model must return it unchanged."""

    def __init__(self, rows_SD: Tensor, passed: tuple[str, ...]) -> None:
        """``rows_SD`` are sent to the next stage; ``passed`` are the layers that the model has called since."""
        self.rows_SD = rows_SD
        self.passed = passed

    def _refuse_operator(self, *_: object) -> NoReturn:
        _refuse("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse_operator
    __matmul__ = __rmatmul__ = __pow__ = __getitem__ = __len__ = _refuse_operator

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for attributes that only tensors have."""
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)))


def _refuse(what: str) -> NoReturn:
    raise InvalidArgument(
        f"{what} is not for the output of another stage, which this rank never sees: make it a module with a scope of "
        "its own, as gt.Replicate(stage=1), let the model return what its last stage gave, and do the rest in loss="
    )


class DistantLayer(nn.Module):
    """Placeholder for a layer that the ranks of a later stage hold."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name

    def forward(self, given: Any) -> DistantOutput:
        """Keep rows [S, …] for the next stage; raises InvalidRows for anything else."""
        if isinstance(given, DistantOutput):
            return DistantOutput(given.rows_SD, (*given.passed, self.layer_name))
        return DistantOutput(rows_to_send(given, f"what {self.layer_name!r} was given"), (self.layer_name,))

    def extra_repr(self) -> str:
        return "held by ranks of a later stage"
