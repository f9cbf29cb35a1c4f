"""Stand-in of rows for autograd and module idioms: a parameter without elements in the place of all rows.

Row gradients count only where a backward pass accumulates a gradient into it (``backward()``, but not
``torch.autograd.grad``, nor ``backward(inputs=...)`` of others). Its ``requires_grad`` says whether rows are trained,
and ``grad = None`` drops the collected gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.gradient_carrier import StandInGradient, not_for_clippers


class StandInRows(Protocol):
    """The pending row gradients that a stand-in shows."""

    stand_in: StandIn

    @property
    def name(self) -> str:
        """Name of the rows."""

    def collect(self) -> None:
        """Queue the row gradients of the backward pass that has accumulated into the stand-in."""

    def forget(self) -> None:
        """Drop the row gradients."""

    def gradient_of_module(self) -> Tensor | None:
        """Return the gradient [1] that the stand-in shows; None without row gradients."""


class StandIn(nn.Parameter):
    """Parameter without elements, float32, in the place of the rows of one update."""

    _ddp_ignored = True  # there is nothing to average
    _update: ref[StandInRows]

    def __new__(cls, update: StandInRows) -> StandIn:
        """Return the stand-in for the rows of ``update``, which owns it."""
        made: StandIn = super().__new__(cls, torch.empty(0, dtype=torch.float32, device="cpu"))
        made._update = ref(update)
        made.register_post_accumulate_grad_hook(StandIn._collect)  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def _collect(stand_in: Any) -> None:
        if (update := stand_in._update()) is not None:
            update.collect()

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the rows, a :class:`StandInGradient`; None without one, and for optimizers of parameters."""
        update = self._update()
        return None if update is None or _is_asked_by_optimizer() else update.gradient_of_module()

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        """Drop the row gradients if None. Raises InvalidArgument for anything but the present gradient."""
        update = self._update()
        if update is None or _is_asked_by(_CHECKPOINT):  # it sets one for every parameter, to make optimizer states
            return
        if grad is None:
            update.forget()
            return
        shown = update.gradient_of_module()
        if shown is not None and isinstance(grad, StandInGradient) and _place(grad) == _place(shown):
            return
        raise InvalidArgument(
            f"the gradient of the rows of table {update.name!r} was replaced; only backward() makes it, and a dropped "
            "one does not come back. To scale or clip it call geartrain.clip_grad_norm_(parameters, rows, max_norm)"
        )

    def register_hook(self, hook: Any) -> Any:
        """Raise InvalidArgument: a hook would get no row gradient."""
        update = self._update()
        raise not_for_clippers("" if update is None else update.name, f"The hook {hook!r}")

    def forget(self) -> None:
        """Drop the row gradients."""
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter without rows: rows are trained in one place."""
        return nn.Parameter(torch.empty(0, dtype=torch.float32), self.requires_grad)


_CHECKPOINT = "torch.distributed.checkpoint."


def _place(gradient: Tensor) -> int:
    """Return its address in memory."""
    return gradient.as_subclass(Tensor).data_ptr()


def _is_asked_by(package: str) -> bool:
    """Return whether the caller is a module of ``package``."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(package)


def _is_asked_by_optimizer() -> bool:
    """Return whether the caller is an optimizer of parameters, which must not step or zero rows."""
    frame = sys._getframe(2)
    if frame.f_code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>") and frame.f_back is not None:
        frame = frame.f_back
    return isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def named_dense_parameters(module: nn.Module, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield ``module.named_parameters()`` without stand-ins for rows."""
    for name, parameter in module.named_parameters(**options):
        if not isinstance(parameter, StandIn):
            yield name, parameter


def drop_stand_ins(group: dict[str, Any]) -> None:
    """Remove stand-ins for rows from a group of an optimizer."""
    kept = [not isinstance(item, StandIn) for item in group["params"]]
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [item for item, is_kept in zip(group[key], kept, strict=True) if is_kept]


class ModuleWithRows(nn.Module):
    """Base of modules whose rows are trained: the rows' stand-in is a parameter, but in no state_dict."""

    def register_stand_in(self, update: StandInRows) -> None:
        """Register the stand-in of ``update`` as a parameter."""
        self.register_parameter("stand_in", update.stand_in)

    def named_parameters(self, prefix: str = "", recurse: bool = True, *arguments: Any, **options: Any) -> Any:
        """Yield parameters as ``nn.Module``; no stand-in without ``recurse``, as for DDP and FSDP2."""
        for name, parameter in super().named_parameters(prefix, recurse, *arguments, **options):
            if recurse or not isinstance(parameter, StandIn):
                yield name, parameter

    @contextmanager
    def _without_stand_in(self) -> Iterator[None]:
        stand_in = self._parameters.pop("stand_in")
        try:
            yield
        finally:
            self._parameters["stand_in"] = stand_in

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the stand-in, too, and leave it float32."""
        with self._without_stand_in():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        stand_in = self._parameters["stand_in"]
        if stand_in is not None and (device := fn(stand_in.data).device).type != "meta":
            stand_in.data = stand_in.data.to(device)
        return self

    def _save_to_state_dict(self, *arguments: Any) -> None:
        with self._without_stand_in():
            super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with self._without_stand_in():
            super()._load_from_state_dict(*arguments)
