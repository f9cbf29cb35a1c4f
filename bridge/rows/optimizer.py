"""Optimizer of rows as a ``torch.optim.Optimizer``, and clipping of rows together with dense parameters."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Variable

from geartrain.ams.client.writes import RowWrite
from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import GeartrainError, InvalidArgument, NonFinite
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.rows.pending import Pace, PendingUpdate, Replayed, RowModule, require_row_module
from geartrain.bridge.rows.stand_in import StandIn
from geartrain.bridge.rows.tables import counted_as

CheckedUpdate = tuple[RowOptimizerSpec, PendingUpdate[Any]]
"""Optimizer of a step and the update that it is to apply."""


class RowOptimizer(torch.optim.Optimizer):
    """Optimizer that applies the row gradients of modules. The update is computed where the rows are stored.

    A module is any :class:`~geartrain.bridge.rows.pending.RowModule`: a class head, a slow gear (whose feature
    gradients are delivered to the dense part), or your own.

    Each module has one param_group. It holds ``table`` (the table's name) and the settings of the table's optimizer
    (``lr``, ``momentum`` or ``betas``, ``weight_decay``, ...). Each push carries the current settings, so LR schedulers
    work. If a setting that must not change was changed, such as ``initial_accumulator_value``, the step raises
    InvalidArgument.

    The group's parameter is a placeholder of one element. If the rows' gradients are in this process, the
    placeholder's gradient is their 2-norm, and scaling it scales them. ``torch.amp.GradScaler`` unscales and skips
    steps in this way (``scaler.step(rows)``, ``scaler.unscale_(rows)``). For other rows (streamed, hosted, on ranks,
    summed over ranks) only GradScaler may change the placeholder's gradient, and PyTorch's clippers raise
    InvalidArgument. :func:`clip_grad_norm_` clips rows in every place.
    """

    _step_supports_amp_scaling = True
    """Whether GradScaler calls :meth:`step` also after infinity, with ``found_inf`` and ``grad_scale`` set."""

    def __init__(self, *modules: RowModule | Iterable[RowModule], lr: float | None = None) -> None:
        """Train the rows of one or several modules; ``lr`` replaces that of their tables. Raises InvalidArgument."""
        updates: list[PendingUpdate[Any]] = []
        for item in modules:
            if isinstance(item, Iterable) and not isinstance(item, RowModule):
                updates += [require_row_module(module) for module in item]
            else:
                updates.append(require_row_module(item))
        if not updates:
            raise InvalidArgument("RowOptimizer was given no module; give it at least one with rows, as a ClassHead")
        self._updates = {id(update.carrier): update for update in updates}
        if len(self._updates) < len(updates):
            raise InvalidArgument("a module was given to RowOptimizer twice; give each once")
        groups = [update.param_group() for update in updates]
        if lr is not None:
            lr = real_number("lr", lr.item() if isinstance(lr, Tensor) else lr)
            groups = [{**group, "lr": lr} for group in groups]
        super().__init__(groups, {})
        self.defaults = {name: value for name, value in groups[0].items() if all(name in group for group in groups)}
        for name in ("params", "table"):
            del self.defaults[name]
        self._unscaled: list[object] = []
        """Pending gradients that a failed step has unscaled for GradScaler."""
        self._has_unit_loss = False
        """Whether a loss of :meth:`step_in_backward` was seen that nothing multiplied."""
        for update in updates:
            update.is_optimized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InvalidArgument for anything but the modules given at construction."""
        params = param_group["params"]
        if len(params) != 1 or id(params[0]) not in self._updates:
            raise InvalidArgument("RowOptimizer trains rows only; give dense parameters to an optimizer of their own")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, whose groups are identified by the names of their tables.

        Numbers of the optimizer that an older state lacks stay unchanged. Raises InvalidArgument if it has other
        tables; nothing is loaded then.
        """
        rows, others = self.split_saved(state_dict["param_groups"])
        super().load_state_dict({**state_dict, "param_groups": [*rows, *others]})
        for group in self.param_groups:
            for name, value in self._updates[id(group["params"][0])].param_group().items():
                group.setdefault(name, value)

    def split_saved(self, groups: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the groups of these tables in a state's param_groups, in the order of the own, and the other groups.

        Raises InvalidArgument if the state has other tables.
        """
        tables = [group["table"] for group in self.param_groups]
        saved = defaultdict(list)  # tables of two clusters may have one name: their groups are in order
        for group in groups:
            saved[group.get("table")].append(group)
        for name in tables:
            if len(saved[name]) != tables.count(name):
                known = ", ".join(repr(item) for item in saved if item is not None and saved[item]) or "none"
                raise InvalidArgument(
                    f"the state has {counted(len(saved[name]), 'param_group')} of the rows of table {name!r}, not "
                    f"{tables.count(name)} (of tables: {known}); load it into an optimizer of the same modules"
                )
        rows = [saved[name].pop(0) for name in tables]
        return rows, [group for others in saved.values() for group in others]

    @counted_as("push")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the pending row gradients: one request to each shard, with a push per table, each applied once by itself
        (streamed rows: one request for each block; a hosted head: one of its own).

        Raises before any push: NonFinite if a gradient is not finite, InvalidArgument for a number of a param_group
        that is out of range or cannot change, TableNotFound if a table was restored since the forward pass (call
        zero_grad()). After an error the gradients that were not pushed are still pending: call step() again, or
        zero_grad() to drop them. A step that GradScaler skips pushes nothing and drops them: they could not be pushed
        later either. With embeddings of ``mode=gt.SSP(s)`` it returns once no other worker is more than s steps behind.

        Pushes that :func:`gt.prefetch` sends in the background are under way when it returns. Their error is
        raised by the next step, once, before that step pushes; the one after it retries the pushes that were not
        applied, and zero_grad() drops them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and bool(found_inf):
            self.zero_grad()
            self.report_step()
            return loss
        try:
            checked = self.check()
            if grad_scale is not None:
                self.unscale_once(grad_scale)
            self.push(checked)
        except BaseException:
            forget_scale(self)
            raise
        self.report_step()
        return loss

    def step_in_backward(self, loss: Tensor) -> None:
        """Let the coming ``loss.backward()`` call :meth:`step` where it ends, while DDP's gradients still travel.

            loss = head(model(images), labels)
            rows.step_in_backward(loss)                 # in the place of rows.step()
            loss.backward()
            optimizer.step()

        The rows are the same. DDP's gradients of the backbone are there, as always, when ``backward()`` returns.
        ``backward()`` raises what the step does, and InvalidArgument if the loss is multiplied first, as GradScaler
        does: rows are written before anything could unscale them. Clip no gradients after it, as those of rows are gone
        by then. Raises InvalidArgument unless the loss has a graph.
        """
        if not loss.requires_grad:
            raise InvalidArgument(
                "the loss has no graph; call step_in_backward(loss) before loss.backward(), and outside torch.no_grad()"
            )
        queue = Variable._execution_engine.queue_callback

        def apply(scale: Tensor) -> None:
            try:
                # Read once, as a device is waited for; the step itself refuses what is not finite.
                if not self._has_unit_loss and math.isfinite(factor := float(scale)):
                    if factor != 1.0:
                        raise InvalidArgument(
                            f"the loss was multiplied by {factor:g} before backward(): with GradScaler call "
                            "scaler.step(rows) after it instead, otherwise give step_in_backward() the tensor that "
                            "backward() is called on"
                        )
                    self._has_unit_loss = True
                self.step()
            except BaseException as exc:
                queue(functools.partial(_raise, exc))  # DDP is to end its pass before

        # Callbacks run in the order in which they are queued, and DDP queues its own after the last gradient.
        loss.register_hook(lambda scale: queue(functools.partial(apply, scale)))  # type: ignore[no-untyped-call]

    def unscale_once(self, grad_scale: Tensor) -> None:
        """Divide by GradScaler's scale, once, even if a failed step is called again."""
        now = [update.pending for update in self._updates.values()]
        if not any(was is not None and was is its for was, its in zip(self._unscaled, now, strict=False)):
            self.multiply_gradients(1.0 / float(grad_scale))
            self._unscaled = now

    def check(self) -> list[CheckedUpdate]:
        """Return the updates for :meth:`push`. Raises the errors of :meth:`step` before any push; nothing travels."""
        for update in self._updates.values():  # pushes of earlier steps first
            if update.background is not None:
                update.background.raise_or_retry()
                if update.background.is_closed and update.background.is_clean:
                    update.background = None
        steps = []
        for group in self.param_groups:
            update = self._updates[id(group["params"][0])]
            update.require_present()
            steps.append((update.optimizer_of(group), update))
            update.check_finite()
        return steps

    def push(self, checked: Sequence[CheckedUpdate]) -> None:
        """Apply the checked updates, each once. After an error check and push again, or drop the rest."""
        prepared: list[tuple[RowOptimizerSpec, PendingUpdate[Any], Sequence[RowWrite]]] = []
        together: list[RowWrite] = []
        later: dict[int, list[RowWrite]] = {}
        for optimizer, update in checked:
            writes = update.prepare(optimizer)
            prepared.append((optimizer, update, writes))
            (together if update.background is None else later.setdefault(id(update.background), [])).extend(writes)
        error = _send_together(together) if len(together) > 1 else None  # a single write is sent by its own update
        for optimizer, update, writes in prepared:
            if update.background is not None:
                if waiting := later.pop(id(update.background), None):
                    update.background.submit(waiting)
                if writes:
                    update.hand_over()
            elif error is None or (writes and all(write.is_sent for write in writes)):
                update.apply(optimizer)
        if error is not None:
            raise error
        self._unscaled = []
        for _, update in checked:
            update.frozen_steps += not update.is_trained

    def replay(self, graph: Replayed) -> None:
        """Replay a ``torch.cuda.CUDAGraph`` that holds a training step of all modules, :meth:`step` included.

            with torch.cuda.graph(graph):               # after three steps as always, by which kernels are compiled
                loss = head(backbone(images), labels)
                loss.backward()
                optimizer.step(); rows.step()
            for batch in loader:
                images.copy_(batch.images); labels.copy_(batch.labels)
                rows.replay(graph)                      # in the place of graph.replay()

        Learning rates are the present ones of the groups; their other values must be as captured. Steps
        are counted as by :meth:`step`, samples and rounding continue as without a graph: the rows are the same.
        Not for GradScaler. With several ranks every rank calls it, over NCCL; one
        exchange between the hosts. Raises InvalidArgument (a captured setting has changed; the error says
        which steps cannot be captured), and as a head's next call would, NonFinite and InvalidIds of earlier steps.
        """
        for group in self.param_groups:
            update = self._updates[id(group["params"][0])]
            update.before_replay(graph, update.optimizer_of(group))
        graph.replay()
        for update in self._updates.values():
            update.after_replay(graph)

    def pending(self) -> list[tuple[object, int]]:
        """Return what is pending of each update, and its number of backward passes."""
        return [(update.pending, update.num_passes) for update in self._updates.values()]

    def report_step(self) -> None:
        """Report a step of this worker to the others that wait for it."""
        told: list[Pace] = []
        for update in self._updates.values():
            if update.pace is not None and update.pace not in told:
                update.pace.step_done()
                told.append(update.pace)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop the pending row gradients; nothing is pushed."""
        super().zero_grad(set_to_none=True)
        self._unscaled = []
        for update in self._updates.values():
            update.discard()
            if update.background is not None:
                update.background.drop()

    def multiply_gradients(self, factor: float | Tensor) -> None:
        """Multiply the pending row gradients of all modules."""
        for update in self._updates.values():
            update.multiply(factor)

    def squared_norm(self) -> float:
        """Return Σ g² of all pending row gradients, as the step would apply them; costs as :func:`clip_grad_norm_`."""
        return math.fsum(update.squared_norm() for update in self._updates.values())

    def squares_on_device(self) -> list[Tensor] | None:
        """Return the terms of :meth:`squared_norm` (0-dim, float64) on the rows' devices; None: some are on a host."""
        found = [update.squares_on_device() for update in self._updates.values()]
        return None if any(squares is None for squares in found) else [item for item in found if item is not None]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the pending row gradients alone; :func:`clip_grad_norm_` clips them with dense parameters."""
        return clip_grad_norm_((), self, max_norm)


def forget_scale(optimizer: Any) -> None:
    """Remove GradScaler's attributes after a failed step: at a retry they would count as a further scale."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


@runtime_checkable
class Clippable(Protocol):
    """Optimizer of its own parameters that can be clipped, such as a DenseTable."""

    def clippable(self) -> list[Tensor]:
        """Return the parameters whose ``grad`` is clipped in place. Raises InvalidArgument if it cannot be."""


@runtime_checkable
class HoldsRows(Protocol):
    """Optimizer of dense parameters and rows, as made by :func:`geartrain.joint`."""

    @property
    def rows(self) -> RowOptimizer:
        """Optimizer of the rows."""


Clipped = RowOptimizer | HoldsRows | Clippable


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    rows: Clipped | Iterable[Clipped],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients, of dense parameters and of rows, so that their joint 2-norm is at most ``max_norm``.

    It equals :func:`torch.nn.utils.clip_grad_norm_` of a model whose rows are parameters, wherever they are: the norm
    of the rows is that of the gradient that the step would apply, summed by id, over micro-batches and over ranks,
    after the inverse loss scale. Gradients of parameters are scaled in place, the rows' step carries the factor.

        scaler.unscale_(optimizer); scaler.unscale_(rows)          # with torch.amp.GradScaler, first
        gt.clip_grad_norm_(model.parameters(), rows, max_norm=5.0)

    Cost, beside the dense part: nothing for rows pulled at once by one worker; one more pull of all active rows where
    they are streamed; one request per shard where they are hosted; the gradients made once more where they are on
    ranks. With ranks every rank calls it: rows pulled by several are summed over them (4·A·D bytes each, as in a
    step), of hosted ones the features (4·B·D).

    Args:
        parameters: Dense parameters, or one; those without a gradient are left out. Gradients have any dtype and device
            and may be DTensors (FSDP2); under DDP they are equal on all ranks.
        rows: Optimizer of :func:`geartrain.joint`, RowOptimizer, or several of them. Of a SlowGear the gradients of
            its features count. A DenseTable stands for the parameters it trains (in mode "sync" it is refused: its
            ranks' mean is computed in the shards).
        max_norm: > 0; may be infinite, to measure the norm only.
        error_if_nonfinite: Raise NonFinite, and scale nothing, if the norm is not finite.

    Returns:
        The norm before clipping, 0-dim, on the device of the first gradient, in float32 (float64 if one is).

    Raises:
        InvalidArgument: ``max_norm`` or ``rows`` are something else.
        NonFinite: the norm is not finite, with ``error_if_nonfinite``.
        ShardUnavailable, SyncError: the norm of rows elsewhere could not be computed; nothing was scaled.
    """
    if not real_number("max_norm", max_norm) > 0:
        raise InvalidArgument(f"max_norm is {max_norm!r}; it must be > 0")
    listed = [
        one.rows if isinstance(one, HoldsRows) else one for one in (rows if isinstance(rows, Iterable) else [rows])
    ]
    for one in listed:
        if not isinstance(one, RowOptimizer | Clippable):
            raise InvalidArgument(
                f"rows is {quoted(one)}; it must be what geartrain.joint made, a RowOptimizer, a DenseTable, or several"
            )
    optimizers = list({id(one): one for one in listed if isinstance(one, RowOptimizer)}.values())
    dense = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for one in listed:
        if isinstance(one, Clippable):
            dense += one.clippable()
    carriers = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    distinct = {id(param): param for param in dense if id(param) not in carriers and not isinstance(param, StandIn)}
    grads = [param.grad for param in distinct.values() if param.grad is not None]
    squares = _on_one_device(grads, optimizers)
    with torch.no_grad():
        if squares is not None:
            return _clip_on_device(squares, grads, optimizers, max_norm, error_if_nonfinite)
        norm = math.sqrt(math.fsum([*_squared_norms(grads), *(optimizer.squared_norm() for optimizer in optimizers)]))
        if error_if_nonfinite:
            _require_finite(norm)
        factor = norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6)) if norm < math.inf else 0.0
        if factor != 1.0:
            for grad in grads:
                grad.mul_(factor)
            for optimizer in optimizers:
                optimizer.multiply_gradients(factor)
    is_wide = any(grad.dtype == torch.float64 for grad in grads)
    device = grads[0].device if grads else None
    return torch.tensor(norm, dtype=torch.float64 if is_wide else torch.float32, device=device)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _require_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise NonFinite(f"the joint norm of the gradients is {norm}; nothing was scaled")


def _on_one_device(grads: list[Tensor], optimizers: list[RowOptimizer]) -> list[Tensor] | None:
    """Return Σ g² of all rows and all parameters, 0-dim, if they are on one device other than a CPU; else None."""
    if not optimizers or any(grad.device.type == "cpu" for grad in grads):
        return None
    of_rows = [optimizer.squares_on_device() for optimizer in optimizers]
    squares = [item for of_one in of_rows for item in of_one or ()]
    if any(of_one is None for of_one in of_rows) or len({item.device for item in (*grads, *squares)}) != 1:
        return None
    plain = [grad for grad in grads if not hasattr(grad, "full_tensor")]
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = [*torch._foreach_norm(plain, 2, wide)] if plain else []
    norms += [
        torch.linalg.vector_norm(grad, dtype=wide).full_tensor() for grad in grads if hasattr(grad, "full_tensor")
    ]
    return [*squares, torch.stack([norm.double() for norm in norms]).square_().sum()] if norms else squares


def _clip_on_device(
    squares: list[Tensor], grads: list[Tensor], optimizers: list[RowOptimizer], max_norm: float, must_be_finite: bool
) -> Tensor:
    """Do :func:`clip_grad_norm_` without waiting for the norm, unless it ``must_be_finite``.

    Rows with a gradient that is not finite stay unchanged, and are reported later: parameters are clipped without them.
    """
    terms = torch.stack(squares)
    norm = terms.sum().sqrt_()
    if must_be_finite:
        _require_finite(float(norm))
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)  # 0 of an infinite norm, NaN of NaN
    if grads:
        finite_norm = terms.where(terms.isfinite(), 0.0).sum().sqrt_()
        torch._foreach_mul_(grads, (max_norm / (finite_norm + 1e-6)).clamp_(max=1.0))
    for optimizer in optimizers:
        optimizer.multiply_gradients(factor)
    return norm if any(grad.dtype == torch.float64 for grad in grads) else norm.float()


def _squared_norms(grads: list[Tensor]) -> list[float]:
    """Return Σ g² of each. The host waits once for each device, not for every parameter."""
    norms: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32)
        if hasattr(norm, "full_tensor"):  # a DTensor: this rank has a part
            norm = norm.full_tensor()
        norms.setdefault((norm.device, norm.dtype), []).append(norm)
    return [norm * norm for alike in norms.values() for norm in torch.stack(alike).tolist()]


def _send_together(writes: Sequence[RowWrite]) -> GeartrainError | None:
    """Send several pushes in one request to each shard; return the first error."""
    try:
        writes[0].send_with(writes[1:])
    except GeartrainError as exc:
        return exc
    return None
