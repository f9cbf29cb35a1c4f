"""Model with replicated or split parts, as a module: one call is a forward pass on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from geartrain.ams.values.errors import InvalidArgument, SyncError
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.mean import mean_of_ranks
from geartrain.bridge.parallel.global_mean import LossFunction, own_sum_of
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.overlap.inputs import micro_batch, sizes_of_parts
from geartrain.bridge.parallel.overlap.split_parts import SplitParts
from geartrain.bridge.parallel.replicated import Replicas
from geartrain.bridge.parallel.scopes import Scope
from geartrain.bridge.parallel.split.agreement import BUFFERS, END, LOSS, StepAgreement
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.logits import SplitLogits
from geartrain.bridge.rows.eager import runs_eagerly

if TYPE_CHECKING:
    from geartrain.bridge.parallel.plan.hardware import Hardware
    from geartrain.bridge.parallel.plan.plan import Plan


class PlanMaker(Protocol):
    """Makes plans of a model from its state before it was split."""

    def saw(self, inputs: Any, labels: Any) -> None:
        """Record a call of the model: a rank's batch."""

    def plan(
        self, model: Any, hardware: Hardware | None, optimizer: Callable[[list[nn.Parameter]], Any] | None
    ) -> Plan:
        """Plan for the recorded batch; ``hardware`` None: measured here, ``optimizer`` None: AdamW."""


class ParallelModel(nn.Module):
    """The result of :func:`geartrain.parallelize`.

    Attributes: ``module``, the model itself with its split layers; ``mesh``, ``scopes``, ``loss``; ``micro_batches``;
    ``replicas``, whose ``ddp`` takes communication hooks.

    ``parameters()`` are those of the model: give them to any elementwise optimizer of torch, or to LARS and LAMB. Those
    of split layers are DTensors over the ranks, which torch's ``SGD(fused=True)`` refuses. ``state_dict()`` has the
    names of the original model. ``gt.save`` and ``torch.distributed.checkpoint`` save it, to be loaded on any number of
    ranks. Not thread-safe.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        scopes: Mapping[str, Scope],
        loss: LossFunction | None,
        replicas: Replicas,
        agreement: StepAgreement,
        plans: PlanMaker | None = None,
        micro_batches: int = 1,
    ) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.scopes = dict(scopes)
        self.loss = loss
        self.replicas = replicas
        self._agreement = agreement
        self._plans = plans
        self.micro_batches = micro_batches
        linear = [part for part in module.modules() if isinstance(part, SplitLinear)]
        self._parted = linear[0] if micro_batches > 1 else None
        self._has_own_buffers = False
        """Whether a training step may have given this rank other buffers than the others."""
        self._left_others: str | None = None
        """Error of this rank that the others do not know of."""
        self.train(module.training)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """DDP module of all parameters that are whole on every rank; None with one rank, or without such parameters."""
        return self.replicas.ddp

    @property
    def saving_ranks(self) -> Communicator | None:
        """Ranks that call ``gt.save`` and ``gt.load`` of it together; None: one process."""
        return self.mesh.whole.link if self.mesh.world_size > 1 else None

    @property
    def plan(self) -> Plan:
        """Cost of a step with batches like the first of the training: ``print(model.plan.explain())``.

        It needs no other rank, so a single one may print it: compute is measured in this process in about two seconds,
        links count as free, and AdamW is assumed; :meth:`plan_for` takes the actual ones. Raises InvalidArgument before
        the first batch, and for a model that cannot run without values.
        """
        return self.plan_for()

    def plan_for(
        self, hardware: Hardware | None = None, optimizer: Callable[[list[nn.Parameter]], Any] | None = None
    ) -> Plan:
        """Plan as ``plan`` does, on ``hardware`` (``gt.Hardware.measure()`` on every rank measures the links, too) and
        with the optimizer made by ``optimizer``, as ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)``.
        """
        if self._plans is None:
            raise InvalidArgument("this model has no plan: gt.parallelize did not make it")
        return self._plans.plan(self, hardware, optimizer)

    @runs_eagerly
    def forward(self, inputs: Any, labels: Tensor | None = None, **options: Any) -> Any:
        """Return the loss (0-dim) over the samples of all ranks, from this rank's part; every rank calls it.

        It is the same number on every rank, and its backward pass computes its gradient by every parameter: ranks may
        have different numbers of samples, or none. Every rank goes backward from it, with the same factor. A custom
        ``loss`` with ``reduction`` "mean", or without such an attribute, counts as a mean over samples: if some labels
        do not count, pass ``nn.CrossEntropyLoss(ignore_index=...)`` itself.

        The first call in ``eval()`` after a training step gives every rank the buffers of rank 0, such as the
        statistics of batch norm, unless it has no labels and nothing is split: then one rank may call alone, with its
        own.

        Without labels it is the model's output; of split logits, in ``eval()``, all classes of the own samples [S, C],
        in training :class:`SplitLogits`, which ``F.cross_entropy`` accepts. A tuple or dict as ``inputs`` is several
        arguments of the model; ``options`` are passed to it, too. If ``loss`` is None, so are the labels, after a
        tuple, or in a dict under that name, and the model returns its own loss. If a model returns a tuple, list or
        dict with split logits in it, ``loss`` reduces all of it to one number: its terms from whole outputs count as
        means over the own samples.

        ``torch.compile`` skips it; compile parts, such as ``model.module.backbone``.

        Raises InvalidIds for labels (on a CPU), InvalidArgument, SpecMismatch where ranks differ, SyncError where
        another rank failed, RankLost where one is gone. A rank that fails in a sharded part cannot report it to the
        others, which gather its next parameters: it refuses further calls (SyncError), and they wait until it ends.
        """
        if self.loss is None and labels is not None:
            inputs = _with_labels(inputs, labels)
        if self.loss is None:
            labels = None
        if self._plans is not None and self.training:
            self._plans.saw(inputs, labels)
        if self._left_others is not None:
            raise SyncError(
                "an earlier call failed on this rank while the others gathered sharded parameters, and this rank could "
                f"not report it ({self._left_others}); their step would continue with this one. End all ranks, and "
                "start them again"
            )
        try:
            return self.replicas.run(lambda: self._run(inputs, labels, options))
        except Exception as exc:  # of any kind: the others wait for this rank
            if self.replicas.is_gathered:
                self._agreement.announce_failure(exc)
            else:
                self._left_others = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self._agreement.finish_forward()

    def output(self, inputs: Any, options: Mapping[str, Any]) -> Any:
        """Return the output of the model itself."""
        match inputs:
            case tuple() | list():
                return self.module(*inputs, **options)
            case dict():
                return self.module(**inputs, **options)
            case _:
                return self.module(inputs, **options)

    def _run(self, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]) -> Any:
        # A whole model that only checks its samples may do so on one rank.
        meets = self._agreement.has_layers or labels is not None or (self.training and torch.is_grad_enabled())
        if meets:
            self._agreement.start_forward(has_labels=labels is not None, trains=self.training)
            self._share_buffers()
            self._agreement.collectives_end()
        if self._parted is not None and labels is not None and self.training and torch.is_grad_enabled():
            return self.loss_of_split(self._logits_of_parts(self._parted, inputs, options), labels)
        output = self.output(inputs, options)
        if self.loss is None or labels is None:
            if not self.training and _has_split_logits(output):
                return tree_map_only(SplitLogits, SplitLogits.whole, output)
            if meets:
                self._agreement.agree(END)
            return output
        if _has_split_logits(output) or self.mesh.world_size == 1:
            return self.loss_of_split(output, labels)
        return self._loss_of_ranks(output, labels)

    def _share_buffers(self) -> None:
        """Give all ranks the same buffers before an evaluation, as DDP does before a training step."""
        if self._has_own_buffers and not self.training and self.replicas.buffers():
            self._agreement.agree(BUFFERS)
            self.replicas.share_buffers()
        self._has_own_buffers = self.training

    def loss_of_split(self, output: Any, labels: Tensor) -> Tensor:
        """Return the loss of split logits; unless it is torch's, which ends with a collective, the ranks meet after
        it."""
        assert self.loss is not None
        value = self.loss(output, labels)
        if type(self.loss) is not nn.CrossEntropyLoss:
            self._agreement.agree(END)
        return value

    def _logits_of_parts(self, layer: SplitLinear, inputs: Any, options: Mapping[str, Any]) -> SplitLogits:
        """Return the logits of the batch; features of one micro-batch travel while others are computed."""
        count, samples = self.micro_batches, num_samples(inputs)
        batches = [
            micro_batch([inputs, dict(options)], part, count, samples, with_settings=True) for part in range(count)
        ]
        layer.sink = parts = SplitParts(layer, sizes_of_parts(samples, count), lambda: self.replicas.is_gathered)
        try:
            for batch in batches:
                self.replicas.gather_anew()
                parts.compute(partial(self.output, *batch))
        finally:
            layer.sink = None
        return parts.logits()

    def _loss_of_ranks(self, output: Any, labels: Tensor) -> Tensor:
        """Return the mean loss over all ranks from whole outputs of the own samples."""
        assert self.loss is not None
        link, reduction = self.mesh.stage.link, getattr(self.loss, "reduction", "mean")
        own: list[tuple[Tensor, Tensor]] = []

        def compute() -> None:
            if reduction not in ("mean", "sum"):
                raise InvalidArgument(
                    f"the loss has reduction={reduction!r}; it must be 'mean' or 'sum', over the samples of all ranks"
                )
            own.append(own_sum_of(self.loss, reduction, output, labels))  # type: ignore[arg-type]

        self._agreement.sizes(LOSS, labels.reshape(-1), compute)  # their other dimensions may differ between ranks
        own_sum, amount = own[0]
        return mean_of_ranks(own_sum, amount if reduction == "mean" else None, link)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes inside only add up; the first one after it averages over the ranks.

        Gradients of split layers are those of all ranks at once; they add up, too.
        """
        with self.replicas.no_sync():
            yield

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the model's state by its own names; parameters of split and sharded parts are DTensors."""
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        """Load a :meth:`state_dict` of any number of ranks, or the original model's."""
        return self.module.load_state_dict(state_dict, *arguments, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModel:
        if self.mesh.world_size > 1:
            raise InvalidArgument(
                "a parallel model cannot be moved or cast: its parameters are in the memory of collectives. Move the "
                "model before gt.parallelize"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _with_labels(inputs: Any, labels: Tensor) -> Any:
    """Return the arguments of a model that computes its loss."""
    match inputs:
        case tuple() | list():
            return (*inputs, labels)
        case dict():
            return {**inputs, "labels": labels}
        case _:
            return (inputs, labels)


def num_samples(inputs: Any) -> int:
    """Entries of the first tensor among ``inputs``. Raises InvalidArgument."""
    found = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if found is None:
        raise InvalidArgument(f"inputs are {quoted(inputs)}; with micro_batches they hold a tensor [S, …] of samples")
    return len(found)


def _has_split_logits(output: Any) -> bool:
    return any(isinstance(leaf, SplitLogits) for leaf in tree_leaves(output))
