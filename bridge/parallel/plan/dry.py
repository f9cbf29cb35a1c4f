"""Dry run of a model as rank 0 of several ranks: its own code runs on meta tensors, without the other ranks.

Legend: A active classes of all ranks, B samples of all ranks, D width, R ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator, Pending, Traffic
from geartrain.bridge.head.memory import MemoryReport, memory_report
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh, MeshGroup
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.meta import meta_like
from geartrain.bridge.parallel.plan.trace import FEATURE_GRADIENTS, FEATURES, Collective, Kind, StepTrace
from geartrain.bridge.parallel.replicated import Replicas
from geartrain.bridge.parallel.scopes import Scope, Split, scoped
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.registry import SplitPlace, backend_of, check_can_split, split_layer
from geartrain.bridge.parallel.split.shard import RowShard

_EXCHANGED = 12
"""Integers that the ranks of a class head exchange before a step, as in ``RankStep.agree``."""
_MEMORY_SETTINGS = ("num_classes", "dim", "sub_centers", "bias", "optimizer", "select", "config")
"""Settings of a class head that ``memory_report`` takes."""


class DryLink(Communicator):
    """Rank 0 of ``world_size`` ranks that all do the same; it sends nothing, and ``trace`` records its collectives.

    The bytes of a collective are those that :class:`Communicator` counts.
    """

    def __init__(self, world_size: int, trace: StepTrace) -> None:  # no process group: Communicator's own is not called
        self.world_size, self.rank = world_size, 0
        self.traffic = Traffic()
        self._trace = trace

    def start_exchange(self, values: Sequence[int], operation: str = "all-gather") -> Pending[list[list[int]]]:
        """Return the result as if every rank passed the same."""
        del operation
        self._record("all-gather", len(values) * 8 * self.world_size, "sizes and checks")
        return Pending.done([list(values)] * self.world_size)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the result as if every rank passed the same; exchanges while layers are made are not counted."""
        return [value] * self.world_size

    def start_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Return [Σ n_r, …] without values."""
        what = "labels or ids"
        if tensor.dtype.is_floating_point:
            what = FEATURES if tensor.ndim > 1 else "numbers of samples"
        row = tensor[:0].new_empty(1, *tensor.shape[1:])
        self._record("all-gather", max(sizes) * self.world_size * row.nbytes, what)
        return Pending.done(tensor.new_empty(sum(sizes), *tensor.shape[1:]))

    def start_sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Return [n_0, D] without values."""
        rows = max(sizes) * self.world_size
        self._record("reduce-scatter", rows * tensor_BD[:1].nbytes, FEATURE_GRADIENTS)
        return Pending.done(tensor_BD.new_empty(sizes[0], *tensor_BD.shape[1:]))

    def all_to_all(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Return Σ ``arriving`` numbers without values."""
        del leaving
        self._record("all-to-all", sum(arriving) * values.element_size(), "logits of the own samples")
        return values.new_empty(sum(arriving))

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        del operation
        self._record("all-reduce", tensor.nbytes, "numbers of the softmax")
        return tensor.new_empty(tensor.shape)

    def _record(self, kind: Kind, num_bytes: int, what: str) -> None:
        if self.world_size > 1:
            self._trace.record_collective(kind, what, num_bytes, self.world_size)


class HeadSkeleton(nn.Module):
    """Stands for a :class:`ClassHead` with ``rows="ranks"``: records its collectives and work; its loss has no value.

    Costs are formulas that follow its code, as compiled code cannot be traced.
    """

    def __init__(self, name: str, settings: Mapping[str, Any] | None, *, margin: bool = False, sums: int = 2) -> None:
        """``settings``: arguments of ``memory_report``; None: its rows are in a cluster. ``sums``: number in its
        softmax."""
        super().__init__()
        self.name, self.settings, self.has_margin, self.sums = name, settings, margin, sums
        self.link: DryLink | None = None
        self.trace: StepTrace | None = None
        self.products = "float32"
        """Type of the features, in which products are made."""
        self.device = "cpu"
        """Device of the rows."""

    def forward(self, features: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return a loss (0-dim) without value; features [S, D], labels [S]. Raises InvalidArgument with sample
        weights."""
        if self.settings is not None and (self.link is None or weight is not None):
            raise InvalidArgument("a plan counts a class head without sample weights, on ranks; leave the weights out")
        active = self.memory(len(features), self.link.world_size if self.link else 1).num_active
        loss: Tensor = _HeadPass.apply(features, labels, self, active)  # type: ignore[no-untyped-call]
        return loss

    def memory(self, batch: int, ranks: int) -> MemoryReport:
        """Return bytes by part, for ``batch`` samples a rank. Raises InvalidArgument if its rows are in a cluster."""
        if self.settings is None:
            raise InvalidArgument(
                f"class head {self.name!r} has its rows in a cluster, whose costs depend on its shards; make it with "
                "rows='ranks', or ask geartrain plan for the memory of such a head"
            )
        return memory_report(**self.settings, rows="ranks", batch_size=batch, num_ranks=ranks, device=self.device)

    def update_seconds(self, samples: int, ranks: int, hardware: Hardware) -> float:
        """Return the time of the update: gradients of the active rows, from features and kept logits, and each row's
        step."""
        report = self.memory(samples, ranks)
        rows = -(-report.num_active // ranks)
        row_bytes = report.table_bytes // report.num_classes
        return hardware.operation(2 * rows * samples * ranks * self.width, row_bytes * 2 * rows, self.products)

    def graph_seconds(self, ranks: int, hardware: Hardware) -> float:
        """Return the time to build the graph of KNN softmax once (``rank_ring.py``), between steps; 0: there is none.

        2·C²·D / R operations of each rank, and two passes of all rows around the ring: in the products' type, and
        stored.
        """
        assert self.settings is not None
        num, dim, dtype = self.settings["num_classes"], self.settings["dim"], self.settings["config"].dtype
        if not self.settings["select"].neighbours_of(num):
            return 0.0
        products, row_bytes = ("float16", 2) if self.device == "cuda" else ("float32", 4)
        laps = [
            Collective(kind="all-gather", what="rows", phase="update", bytes=num * dim * size, ranks=ranks)
            for size in (row_bytes, 4 if dtype == "float32" else 2)
        ]
        seconds = hardware.operation(2 * num * -(-num // ranks) * dim, num * dim * row_bytes, products)
        return seconds + sum(lap.seconds(hardware) for lap in laps)

    @property
    def width(self) -> int:
        """Width of a row."""
        assert self.settings is not None
        return int(self.settings["dim"] * self.settings["sub_centers"] + self.settings["bias"])


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_SD: Tensor, labels: Tensor, head: HeadSkeleton, active: int) -> Tensor:
        assert head.link is not None and head.trace is not None and head.settings is not None
        ctx.shape, ctx.link = features_SD, head.link
        samples, ranks = len(features_SD), head.link.world_size
        sizes = [samples] * ranks
        head.link.exchange([0] * _EXCHANGED)
        own_SD = features_SD.new_empty(samples, head.settings["dim"] + head.settings["bias"])
        joint_BD = head.link.gather(own_SD, sizes)
        head.link.gather(labels, sizes)
        num, select = head.settings["num_classes"], head.settings["select"]
        if ranks > 1 and active < num and (k := select.neighbours_of(num)):
            head.trace.record_collective("all-reduce", "counts of neighbours", 8 * k, ranks)
        head.products = str(own_SD.dtype).removeprefix("torch.")
        width, rows = own_SD.shape[1], -(-active // ranks)
        for _ in range(1 + features_SD.requires_grad):  # logits, and the features' gradient in the same pass
            num_bytes = rows * width * own_SD.element_size()
            head.trace.record(flops=2 * rows * len(joint_BD) * width, num_bytes=num_bytes, dtype=head.products)
        if not head.has_margin:
            head.link.max(joint_BD.new_empty(1, len(joint_BD)))
        head.link.sum(joint_BD.new_empty(head.sums, len(joint_BD), dtype=torch.float64))
        if features_SD.requires_grad:
            head.link.sum_to_owners(joint_BD, sizes)
        return features_SD.new_empty(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        ctx.link.gather(upstream.reshape(1), [1] * ctx.link.world_size)
        return meta_like(ctx.shape), None, None, None


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; its parameters and buffers are neither copied nor allocated.

    Class heads, whose rows are no parameters, become :class:`HeadSkeleton`. Raises InvalidArgument for what is no
    module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {quoted(model)}; it must be a torch.nn.Module")
    known: dict[int, Any] = {}
    for module in model.modules():
        if (backend := backend_of(module)) is not None:
            settings: Any = backend.settings
            known[id(module)] = HeadSkeleton(
                str(module.name),
                None if backend.local is None else {name: getattr(settings, name) for name in _MEMORY_SETTINGS},
                margin=settings.margin is not None,
                sums=3 if settings.config.label_smoothing else 2,
            )
            continue
        for parameter in module.parameters(recurse=False):
            meta = meta_like(parameter)
            known[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
        for buffer in module.buffers(recurse=False):
            known[id(buffer)] = meta_like(buffer)
    return copy.deepcopy(model, known).train()


def without_values(example: Any, batch: int | None) -> tuple[Any, int]:
    """Return the tensors of ``example`` on the meta device, with ``batch`` samples (None: unchanged), and their number.

    The first dimension of its first tensor counts samples; tensors of that length get ``batch`` entries. Raises
    InvalidArgument for an example without a tensor, and a ``batch`` below 1.
    """
    first = next((len(leaf) for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim), 0)
    if not first:
        raise InvalidArgument(
            f"example is {quoted(example)}; it must be a rank's batch as the model takes it, such as (images, labels)"
        )
    samples = first if batch is None else integer("batch", batch, 1)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = [samples] if value.ndim and len(value) == first else list(value.shape[:1])
        return torch.empty([*rows, *value.shape[1:]], dtype=value.dtype, device="meta")

    return tree_map(resized, example), samples


def dry_model(
    model: nn.Module, scopes: Mapping[str, Scope], loss: LossFunction | None, ranks: int, trace: StepTrace
) -> ParallelModel:
    """Return ``model`` as :func:`parallelize` makes it on the first of ``ranks``, which has the most rows; on meta.

    The averaging of replicated parts is left out: it does not show in a forward pass. Raises InvalidArgument for scopes
    that do not fit.
    """
    link = DryLink(ranks, trace)
    group, alone = MeshGroup(tuple(range(ranks)), link, None), MeshGroup((0,), DryLink(1, trace), None)
    agreement = StepAgreement(link)
    skeleton = skeleton_of(model)
    scoped(skeleton, scopes)
    for name, scope in scopes.items():
        module = skeleton.get_submodule(name)
        if isinstance(scope, Split) and isinstance(module, HeadSkeleton):
            module.link, module.trace, module.device = link, trace, trace.hardware.device
        elif isinstance(scope, Split):
            check_can_split(name, module, group.ranks)
            shard = RowShard(next(module.parameters()).shape[0], group)
            layer = split_layer(_DryPlace(name, alone, agreement, 0, shard), module)
            layer.shard = shard  # a DTensor over absent ranks cannot be made: its rows are one rank's
            if name:
                skeleton.set_submodule(name, layer)
            else:
                skeleton = layer
    return ParallelModel(skeleton, Mesh(group, (), group), scopes, loss, Replicas(alone, {}, [], set()), agreement)


@dataclass(frozen=True)
class _DryPlace(SplitPlace):
    """Place of a split layer: makes rank 0's rows of it on the meta device."""

    shard: RowShard

    def rows(self, module: nn.Module, of: str) -> Tensor | None:
        parameter = module._parameters[of]
        return None if parameter is None else parameter.new_empty(self.shard.num_local, *parameter.shape[1:])
