"""Joint ``torch.optim.Optimizer`` of a model's parameters and its rows."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.rows.optimizer import RowOptimizer, forget_scale
from geartrain.bridge.rows.pending import RowModule
from geartrain.bridge.rows.stand_in import drop_stand_ins


def joint(
    optimizer: torch.optim.Optimizer, *modules: RowModule | Iterable[RowModule], row_lr: float | None = None
) -> JointOptimizer:
    """Join the optimizer of a model's parameters and the rows of its modules to one ``torch.optim.Optimizer``.

        optimizer = gt.joint(torch.optim.AdamW(backbone.parameters(), lr=2e-3), head)
        loss = head(backbone(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    It works wherever an optimizer does: LR schedulers (OneCycleLR cycles momentum or betas of both, where
    both have the one or the other), GradScaler, Lightning, Accelerate, the Trainer of transformers. Its
    ``param_groups`` are those of ``optimizer``, the same dictionaries, and one for each module with the numbers of its
    rows' optimizer and ``table``, the name of its table; parameter groups that are added later come last.
    ``state_dict`` is flat, as torch's is, and holds no rows: they are in snapshots.

    Clip with ``gt.clip_grad_norm_(model.parameters(), optimizer, max_norm)``, wherever the rows are.
    ``torch.nn.utils.clip_grad_norm_`` over the parameters of all groups, or of a model that has the modules with rows,
    is just as exact where one worker pulls rows at once, and raises InvalidArgument elsewhere.

    Args:
        optimizer: Optimizer of the dense parameters, of any kind that steps without a closure, also of
            :func:`geartrain.attach`. Parameters that stand for rows (of ``model.parameters()``) are removed from it.
        modules: Modules with rows: class heads, slow gears, or of your own.
        row_lr: Learning rate of all rows; None: that of their tables.

    Raises:
        InvalidArgument: ``optimizer`` is no optimizer, holds rows itself or needs a closure; a module has no rows or is
            given twice; no module is given.
    """
    if isinstance(optimizer, RowOptimizer | JointOptimizer):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}, which trains rows already; give joint() the torch optimizer "
            "of the dense parameters, and the modules with rows after it"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer is {quoted(optimizer)}; it must be a torch.optim.Optimizer of the dense parameters, and the "
            "modules with rows come after it"
        )
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise InvalidArgument(
            f"{type(optimizer).__name__} calls its closure several times a step, and rows are pushed once; choose an "
            "optimizer whose step() needs no closure"
        )
    if not modules:
        raise InvalidArgument(
            "joint() was given no module with rows; give it at least one, as in joint(optimizer, head). Without rows "
            "the torch optimizer does all"
        )
    return JointOptimizer(optimizer, RowOptimizer(*modules, lr=row_lr))


class JointOptimizer(torch.optim.Optimizer):
    """Optimizer of dense parameters and rows, made by :func:`joint`. Not thread-safe."""

    def __init__(self, dense: torch.optim.Optimizer, rows: RowOptimizer) -> None:
        """Step ``rows`` before ``dense``. Raises InvalidArgument."""
        carriers = _ids_of(rows.param_groups)
        for number, group in enumerate(dense.param_groups):
            drop_stand_ins(group)
            if carriers & _ids_of([group]):
                raise InvalidArgument(
                    f"param_group {number} of the optimizer holds the carrier of a head, which stands for its rows; "
                    "leave it out, for joint() adds it (give the optimizer the parameters of the backbone)"
                )
        self._dense = dense
        self._rows = rows
        self._left: list[tuple[object, int]] | None = None
        """Rows left pending by a step that moved the parameters and not all rows."""
        self._unscaled: torch.Tensor | None = None
        """First of the parameters' gradients that a failed step has unscaled for GradScaler."""
        self._num_first = len(dense.param_groups)
        """Number of groups before those of the rows."""
        self._step_supports_amp_scaling = bool(getattr(dense, "_step_supports_amp_scaling", False))
        """Whether GradScaler leaves unscaling and skipping to :meth:`step`."""
        defaults = {name: value for name, value in dense.defaults.items() if name in rows.defaults}
        super().__init__(self.param_groups, defaults)

    @property
    def dense(self) -> torch.optim.Optimizer:
        """Torch optimizer of the parameters."""
        return self._dense

    @property
    def rows(self) -> RowOptimizer:
        """Optimizer of the rows."""
        return self._rows

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """New list of the groups of both. Schedulers identify groups by their places, which never change."""
        dense, first = self._dense.param_groups, self._num_first
        return [*dense[:first], *self._rows.param_groups, *dense[first:]]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore the groups that torch's constructor sets."""

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the dense parameters; that of rows is where the rows are."""
        return self._dense.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        """Ignore the state that torch's constructor sets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add dense parameters, after all present groups. Raises InvalidArgument for rows."""
        if any(param_group is group for group in self.param_groups):
            return  # torch's constructor adds the present ones
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if _ids_of(self._rows.param_groups) & set(map(id, params)):
            raise InvalidArgument("the rows of this head are trained already; add dense parameters only")
        added = {**param_group, "params": params}
        drop_stand_ins(added)
        self._dense.add_param_group(added)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the dense parameters, then push the rows' gradients; ``closure`` is called once, before both.

        The rows' gradients are checked first: an error before any push (see :meth:`RowOptimizer.step`), and
        any error of the dense optimizer, leaves the rows unchanged and their gradients pending. After a later
        error call step() again, which continues where it stopped and applies nothing twice, or zero_grad(), which drops
        the rest. A step that GradScaler skips steps neither.

        Raises InvalidArgument for a backward pass between such an error and the step that continues.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and bool(found_inf):
            _step_unless(found_inf, self._dense)
            _step_unless(found_inf, self._rows)
            return loss
        try:
            checked = self._rows.check()
            if self._left is None or not self._has_stepped_dense(self._left):
                if grad_scale is not None:
                    self._unscale(grad_scale)
                if found_inf is None:
                    self._dense.step()
                else:
                    _step_unless(found_inf, self._dense)
            try:
                self._rows.push(checked)
            except BaseException:
                self._left = self._rows.pending()
                raise
        except BaseException:
            forget_scale(self)
            raise
        self._left = self._unscaled = None
        self._rows.report_step()
        return loss

    def _has_stepped_dense(self, left: list[tuple[object, int]]) -> bool:
        """Return whether a failed step has left rows to push, and nothing has been added since."""
        pairs = list(zip(left, self._rows.pending(), strict=True))
        if not any(was is not None and was is its for (was, _), (its, _) in pairs):
            return False  # or it was dropped
        if any(was is not its or passes != more for (was, passes), (its, more) in pairs):
            raise InvalidArgument(
                "the last step() moved the parameters and stopped with an error before all rows were pushed; call "
                "step() again before the next backward(), or zero_grad() to give the rest up"
            )
        return True

    def _unscale(self, grad_scale: torch.Tensor) -> None:
        """Divide by GradScaler's scale, once, even if a failed step is called again."""
        self._rows.unscale_once(grad_scale)
        gradients = [item.grad for group in self._dense.param_groups for item in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        if gradients and gradients[0] is not self._unscaled:
            for gradient in gradients:
                gradient.mul_(1.0 / float(grad_scale))
            self._unscaled = gradients[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of both; nothing is pushed."""
        self._dense.zero_grad(set_to_none)
        self._rows.zero_grad(set_to_none)
        self._left = self._unscaled = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``. Groups of rows are identified by the name of their table.

        Raises InvalidArgument if it has other tables or is of another kind of optimizer, and what the dense optimizer
        raises: nothing is loaded then.
        """
        rows, dense = self._rows.split_saved(state_dict["param_groups"])
        self._load_dense({"state": state_dict["state"], "param_groups": dense})
        self._rows.load_state_dict({"state": {}, "param_groups": rows})

    def _load_dense(self, state_dict: dict[str, Any]) -> None:
        """Load the dense state. torch accepts that of any kind of optimizer, and fails in the step; so the numbers of
        the groups are checked here, without those that a scheduler adds (``initial_lr``)."""
        before, needed = self._dense.state_dict(), {"params", *self._dense.defaults}
        self._dense.load_state_dict(state_dict)  # it adds numbers that a state of an older torch lacks
        missing = sorted(set().union(*(needed - group.keys() for group in self._dense.param_groups)))
        if missing:
            held = sorted(set().union(*state_dict["param_groups"]) - needed)
            self._dense.load_state_dict(before)
            raise InvalidArgument(
                f"the state has no {', '.join(missing)}, which {type(self._dense).__name__} needs, but "
                f"{', '.join(held) or 'nothing else'}: it is of another kind of optimizer. Load it into one like the "
                "saved; to change the optimizer, load the model without its state"
            )


def _ids_of(groups: Iterable[dict[str, Any]]) -> set[int]:
    """Return the ids of the parameters in groups."""
    return {id(item) for group in groups for item in group["params"]}


def _step_unless(found_inf: torch.Tensor, optimizer: Any) -> None:
    """Step an optimizer that skips by itself steps in which GradScaler found infinity."""
    optimizer.found_inf = found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf
