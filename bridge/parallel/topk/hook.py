"""Sparsified gradients for a module under DistributedDataParallel, as its communication hook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from geartrain.ams.values.arguments import boolean, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator, Traffic
from geartrain.bridge.parallel.topk.bucket import SgdSettings
from geartrain.bridge.parallel.topk.exchange import GradientExchange, Settings
from geartrain.bridge.parallel.topk.requirements import replicated_part


class TopKGradients:
    """Reduces the gradient exchange of a ``DistributedDataParallel`` model to the largest elements.

    Deep gradient compression (Lin 2017; section 3.3.2 of the 100-million-class paper): unsent values stay in a rank's
    own residual until they are among the largest, with momentum applied before (momentum correction) and cleared for
    sent values (factor masking). ::

        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)        # without momentum: TopKGradients has it
        topk = gt.TopKGradients(sparsity=0.999, momentum=0.9, warmup_steps=2000).attach(model, optimizer)

    The training loop stays as it is. After ``backward()`` the gradients are the optimizer's update, momentum and weight
    decay included: clip by ``clip``, not by ``clip_grad_norm_``. Tensors of up to 4096 elements, and those for which
    k · ranks >= elements, are sent dense, and train as SGD with momentum does; with ``sparsity=0`` all of them. A
    changed learning rate applies to late elements, too.

    A backward pass costs an exchange of three integers, one all-gather of 8 · k + 4 bytes a rank for each DDP bucket,
    and one all-reduce of the bucket's dense tensors: on a CPU all during the rest of the backward pass; on devices the
    hosts wait for one another at its start. A rank keeps two numbers (float32) for each parameter, three with weight
    decay, five with a GradScaler.
    """

    def __init__(
        self,
        *,
        sparsity: float = 0.999,
        warmup_steps: int = 0,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        """Store the settings, the same on every rank.

        Args:
            sparsity: unsent share of each large tensor in a step, in [0, 1): 0.999 sends one element in 1000.
            warmup_steps: steps over which the sparsity rises: 75, 93.75, 98.4, 99.6 %. The paper takes four epochs.
            momentum: in [0, 1).
            nesterov: Nesterov momentum, as in ``torch.optim.SGD``.
            weight_decay: added to the gradient, as in ``torch.optim.SGD``; exact, as it needs no communication.
            clip: each rank clips the 2-norm of its own gradient of all parameters to clip · √ranks before it
                accumulates it, so that the mean of as many independent ones is at most about ``clip`` (Lin 2017,
                section 3.2, of shares that are already divided by ranks). The mean of similar gradients is up to √ranks
                larger. Nothing is then sent before the end of the backward pass, as the norm is not known earlier.

        Raises:
            InvalidArgument: a value is out of its range.
        """
        decay = real_number("weight_decay", weight_decay)
        if not 0 <= decay < math.inf:
            raise InvalidArgument(f"weight_decay is {weight_decay}; it must be at least 0 and finite")
        update = SgdSettings(_part("momentum", momentum), boolean("nesterov", nesterov), decay)
        if update.nesterov and not update.momentum:
            raise InvalidArgument("nesterov=True needs momentum above 0; give one, or nesterov=False")
        most = None if clip is None else real_number("clip", clip)
        if most is not None and not most > 0:
            raise InvalidArgument(f"clip is {clip}; it must be above 0, or None")
        sparsity, warmup_steps = _part("sparsity", sparsity), integer("warmup_steps", warmup_steps, 0)
        self._settings = Settings(sparsity, warmup_steps, update, most)
        self._exchange: GradientExchange | None = None

    def attach(self, model: nn.Module, optimizer: Any, *, grad_scaler: Any = None) -> TopKGradients:
        """Start to exchange the gradients of ``model`` in this way; return self. Every rank calls it.

        Args:
            model: a DistributedDataParallel without another communication hook, with parameters in float32 or bfloat16;
                or a model from :func:`geartrain.parallelize`, before its first step: then for its parts that are whole
                on every rank. With ``find_unused_parameters`` or ``static_graph`` a gradient of zeros counts as that of
                an unused parameter: its momentum and residual wait.
            optimizer: trains all of those parameters, without momentum or weight decay: ``torch.optim.SGD(lr=...)``.
                Split parts have another one, with momentum.
            grad_scaler: the ``torch.amp.GradScaler`` of the loop; required if there is one. Residuals are kept
                unscaled. If a gradient of any rank holds NaN or infinity, the scaler skips the step on every rank, and
                momentum and residuals are restored.

        Raises:
            InvalidArgument: an argument is not as described, or this object is attached already.
            SpecMismatch: the ranks disagree on settings or parameters; raised on every rank.
            SyncError: another rank refused.
        """
        if self._exchange is not None:
            raise InvalidArgument("this TopKGradients is attached to a model already; make another one for each model")
        self._exchange = GradientExchange(self._settings, *replicated_part(model), optimizer, grad_scaler)
        return self

    @property
    def steps(self) -> int:
        """Number of applied steps, which drives the warm-up."""
        return self._attached.steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because some rank's gradient was not finite, with a GradScaler."""
        return self._attached.skipped_steps

    @property
    def traffic(self) -> Traffic:
        """Collectives of this rank and their bytes."""
        return self._attached.link.traffic

    def merge(self) -> None:
        """Average all ranks' momentum and residuals on every rank, so that :meth:`state_dict` is complete.

        Every rank calls it, between two steps; :func:`geartrain.save` does. The sum of unsent values stays the same,
        and training continues from there. Costs two all-reduces of the size of the model; without a step since the
        last merge, nothing.

        Raises:
            InvalidArgument: an earlier step failed, or ``optimizer.step()`` has not applied the last gradients.
            SyncError: another rank raised InvalidArgument.
            RankLost: a rank died.
        """
        self._attached.merge()

    @property
    def saving_ranks(self) -> Communicator:
        """Ranks that save together: each has a part of the residuals."""
        return self._attached.link

    def state_dict(self) -> dict[str, Any]:
        """Return steps, momentum and residuals: the same on every rank, for any number of ranks.

        Pass this object to :func:`geartrain.save` on every rank, or call :meth:`merge` on every rank and store the
        result in any way (``torch.save`` on one rank, ``torch.distributed.checkpoint`` on all).

        Raises:
            InvalidArgument: :meth:`merge` was not called since the last step, so this rank has only its part; or
                ``optimizer.step()`` has not applied the last gradients.
        """
        exchange = self._attached
        exchange.require_between_steps()
        if not exchange.is_merged:
            raise InvalidArgument(
                "the residuals of this rank are only a part of what waits; call merge() on every rank before "
                "state_dict()"
            )
        return {"steps": exchange.steps, **exchange.state.shaped()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`, the same on every rank. Sparsity and number of ranks may differ.

        If ranks load different ones, or some load none, the next ``backward()`` raises SpecMismatch on every rank.

        Raises:
            SpecMismatch: it is of other parameters; nothing was changed.
        """
        self._attached.load({kind: state[kind] for kind in ("momentum", "residual", "decay")}, int(state["steps"]))

    @property
    def _attached(self) -> GradientExchange:
        if self._exchange is None:
            raise InvalidArgument("this TopKGradients is attached to no model; call attach(model, optimizer) first")
        return self._exchange


def _part(name: str, value: object) -> float:
    number = real_number(name, value)
    if not 0 <= number < 1:
        raise InvalidArgument(f"{name} is {value}; it must be at least 0 and below 1")
    return number
