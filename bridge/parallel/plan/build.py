"""Plan of a model and its scopes: a dry run counts operations, which are divided by the hardware's rates.

The rules for replicated parts are those of ``torch.nn.parallel.DistributedDataParallel`` and
``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.plan.dry import HeadSkeleton, dry_model, skeleton_of, without_values
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import ExpectedStep, Plan, PlannedCollective, PlannedPart
from geartrain.bridge.parallel.plan.trace import REST, Collective, StepTrace, traced_step, traced_update
from geartrain.bridge.parallel.scopes import Scope, Split
from geartrain.bridge.parallel.split.layer import SplitLayer
from geartrain.bridge.parallel.split.registry import backend_of
from geartrain.bridge.parallel.topk.selection import sent_counts

OptimizerMaker = Callable[[list[nn.Parameter]], Any]

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
"""Bucket sizes of DistributedDataParallel: its first is small, so that communication begins soon."""
_INDEXED_BYTES = 8
"""Bytes of a gradient value sent with its index: int32 and float32."""


@dataclass(kw_only=True, eq=False)
class PlanRequest:
    """Inputs of a plan; :meth:`plan` makes it."""

    model: nn.Module
    """The model, or its skeleton; its values are not read."""
    scopes: Mapping[str, Scope]
    ranks: int
    hardware: Hardware
    inputs: Any
    """Inputs of the model, a rank's batch: tensors on the meta device."""
    labels: Any
    """Labels of the loss; None if the model returns its own."""
    batch: int
    """Samples of a rank."""
    loss: LossFunction | None
    optimizer: OptimizerMaker = torch.optim.AdamW
    micro_batches: int = 1
    sparsity: float | None = None

    def __post_init__(self) -> None:
        """Check the hardware and the numbers."""
        if not isinstance(self.hardware, Hardware):
            raise InvalidArgument(
                f"hardware is {quoted(self.hardware)}; it must be a Hardware, such as gt.Hardware.named('h200')"
            )
        integer("ranks", self.ranks, 1)
        integer("micro_batches", self.micro_batches, 1)
        if self.sparsity is not None and not 0 <= real_number("sparsity", self.sparsity) < 1:
            raise InvalidArgument(f"sparsity is {self.sparsity!r}; it must be in [0, 1), or None: gradients are dense")

    @classmethod
    def of(
        cls, model: nn.Module, scopes: Mapping[str, Scope], example: Any, batch: int | None, **fields: Any
    ) -> PlanRequest:
        """Make a request from an ``example``, as ``ParallelModel`` is called: (inputs, labels), or inputs if the loss
        is the model's own.

        Raises InvalidArgument for an example without tensors, or without labels where a loss needs them.
        """
        inputs, samples = without_values(example, batch)
        labels = None
        if fields["loss"] is not None:
            if not isinstance(inputs, tuple | list) or len(inputs) != 2:
                raise InvalidArgument(
                    "example must be (inputs, labels), for the loss takes labels; inputs may be a tuple"
                )
            inputs, labels = inputs
        return cls(model=model, scopes=dict(scopes), inputs=inputs, labels=labels, batch=samples, **fields)

    def changed(self, *, batch: int | None = None, **fields: Any) -> PlanRequest:
        """Return the same request with another batch, or other fields."""
        if batch is None:
            return replace(self, **fields)
        (inputs, labels), _ = without_values((self.inputs, self.labels), batch)
        return replace(self, inputs=inputs, labels=labels, batch=batch, **fields)

    def plan(self) -> Plan:
        """Run it dry. Raises InvalidArgument for scopes that do not fit, and a model that needs values."""
        heads = [name for name, module in self.model.named_modules() if _is_head_on_ranks(module)]
        unnamed: dict[str, Scope] = {name: Split() for name in heads if name not in self.scopes}
        if unnamed:  # they have no parameters, so parallelize accepts them without a scope
            return replace(self, scopes={**self.scopes, **unnamed}).plan()
        trace = StepTrace(self.hardware)
        dry = dry_model(self.model, self.scopes, self.loss, self.ranks, trace)
        parts = [name for name in self.scopes if name]
        traced_step(dry.module, parts, lambda: dry(self.inputs, self.labels), (self.inputs, self.labels), trace)
        return self._planned(dry.module, trace)

    def _planned(self, model: nn.Module, trace: StepTrace) -> Plan:
        seen = {
            id(parameter)
            for name, scope in self.scopes.items()
            if isinstance(scope, Split)
            for parameter in model.get_submodule(name).parameters()
        }
        found = [pair for recorded in trace.collectives for pair in self._in_micro_batches(*recorded)]
        parts: list[PlannedPart] = []
        replicated: dict[str, list[nn.Parameter]] = {}
        buffers: list[Tensor] = []
        for name, scope in self.scopes.items():
            module = model.get_submodule(name)
            if isinstance(module, HeadSkeleton):
                parts.append(self._head_part(name, module, trace))
                continue
            if isinstance(scope, Split):
                assert isinstance(module, SplitLayer)
                own, rows = list(module.parameters()), module.shard.num / max(1, module.shard.num_local)
                parts.append(self._part(name, "split", trace, own, own, whole=rows))
                continue
            own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
            seen.update(map(id, own))
            if scope.shard and self.ranks > 1:
                local = [_shard_of(parameter, self.ranks) for parameter in own]
                parts.append(self._part(name, "sharded", trace, own, local))
                found += [(name, collective) for collective in _of_sharded(local, self.ranks)]
                continue
            parts.append(self._part(name, "replicated", trace, own, own))
            replicated[name] = own
            buffers += module.buffers()
        averages = list(self._averages([parameter for own in replicated.values() for parameter in own]))
        where = " + ".join(name or "model" for name, own in replicated.items() if own)
        if averages:
            found += [(where, collective) for collective in (*_of_buffers(buffers, self.ranks), *averages)]
        if "" not in self.scopes:
            parts.append(self._part("", "", trace, [], []))
        return Plan(
            scopes=self.scopes,
            ranks=self.ranks,
            batch=self.batch,
            hardware=self.hardware,
            changed=lambda **fields: self.changed(**fields).plan(),
            parts=tuple(parts),
            collectives=tuple(
                PlannedCollective(
                    part="" if part == REST else part,
                    times=times,
                    collective=collective,
                    seconds=times * collective.seconds(self.hardware),
                )
                for (part, collective), times in sorted(
                    Counter(found).items(), key=lambda item: item[0][1].phase == "backward"
                )
            ),
            step=self._expected(parts, found, averages),
            graph_seconds=sum(
                module.graph_seconds(self.ranks, self.hardware)
                for module in map(model.get_submodule, self.scopes)
                if isinstance(module, HeadSkeleton)
            ),
        )

    def _expected(
        self, parts: Sequence[PlannedPart], found: Sequence[tuple[str, Collective]], averages: Sequence[Collective]
    ) -> ExpectedStep:
        """Return the step's time with overlap: buckets but the last beside the rest of the backward pass.

        With n micro-batches the features of one travel while the next is computed, and their gradients while the split
        part works on the next: all but the n-th part of such a collective is hidden.
        """

        def seconds(collectives: Sequence[Collective]) -> float:
            return sum(collective.seconds(self.hardware) for collective in collectives)

        replicated = [part for part in parts if part.scope != "split"]
        hidden = min(seconds(averages[:-1]), sum(part.backward_seconds for part in replicated))
        if self.micro_batches > 1:
            for part in parts:
                own = [
                    collective
                    for name, collective in found
                    if name == part.name and part.scope == "split" and collective.is_of_features
                ]
                for kind, beside in (
                    ("all-gather", sum(part.forward_seconds for part in replicated)),
                    ("reduce-scatter", part.forward_seconds + part.backward_seconds),
                ):
                    travelling = min(beside, seconds([collective for collective in own if collective.kind == kind]))
                    hidden += travelling * (self.micro_batches - 1) / self.micro_batches
        return ExpectedStep(
            forward=sum(part.forward_seconds for part in parts),
            backward=sum(part.backward_seconds for part in parts),
            update=sum(part.update_seconds for part in parts),
            communication=seconds([collective for _, collective in found]),
            hidden=hidden,
            slowed=(1 - self.hardware.overlap) * hidden,
        )

    def _averages(self, replicated: Sequence[nn.Parameter]) -> Iterator[Collective]:
        """Yield the collectives of gradients: an all-reduce of each bucket, and with ``sparsity`` an all-gather.

        Of a tensor as many values, with their indices, are sent as :class:`TopKGradients` does; small ones are dense.
        """
        trained = [parameter for parameter in reversed(replicated) if parameter.requires_grad]
        for bucket in buckets(trained) if self.ranks > 1 else ():
            numels = [tensor.numel() for tensor in bucket]
            sent = sent_counts(numels, self.sparsity, self.ranks) if self.sparsity else numels
            if kept := sum(k for k, numel in zip(sent, numels, strict=True) if k < numel):
                size = kept * _INDEXED_BYTES * self.ranks
                yield Collective(
                    kind="all-gather", what="largest gradients", phase="backward", bytes=size, ranks=self.ranks
                )
            dense = [tensor.nbytes for tensor, k in zip(bucket, sent, strict=True) if k >= tensor.numel()]
            if dense:
                yield Collective(
                    kind="all-reduce", what="gradients", phase="backward", bytes=sum(dense), ranks=self.ranks
                )

    def _in_micro_batches(self, part: str, collective: Collective) -> list[tuple[str, Collective]]:
        """Split the features and their gradients by micro-batch; labels and softmax sums travel once for all."""
        count = self.micro_batches if collective.is_of_features else 1
        return [(part, replace(collective, bytes=-(-collective.bytes // count)))] * count

    def _part(
        self,
        name: str,
        scope: str,
        trace: StepTrace,
        parameters: Sequence[nn.Parameter],
        local: Sequence[nn.Parameter],
        *,
        whole: float = 1.0,
    ) -> PlannedPart:
        trained = [parameter for parameter in local if parameter.requires_grad]
        update, state_bytes = traced_update(trained, self.optimizer, self.hardware)
        has_buckets = scope == "replicated" and self.ranks > 1
        gathered = sum(parameter.nbytes for parameter in parameters) if scope == "sharded" else 0
        return PlannedPart(
            name=name,
            scope=scope,
            num_parameters=round(sum(parameter.numel() for parameter in parameters) * whole),
            parameter_bytes=sum(parameter.nbytes for parameter in local),
            gradient_bytes=sum(parameter.nbytes for parameter in trained) * (1 + has_buckets),
            optimizer_bytes=state_bytes,
            activation_bytes=trace.kept_bytes(name or REST) + gathered,
            forward_seconds=trace.seconds[name or REST, "forward"],
            backward_seconds=trace.seconds[name or REST, "backward"],
            update_seconds=update,
        )

    def _head_part(self, name: str, head: HeadSkeleton, trace: StepTrace) -> PlannedPart:
        report = head.memory(self.batch, self.ranks)
        held = {part.name: part.bytes for part in report.parts if part.holder == "rank" and part.standing}
        rows = held.pop("rows")
        return PlannedPart(
            name=name,
            scope="split",
            num_parameters=report.num_classes * head.width,
            parameter_bytes=rows,
            gradient_bytes=0,
            optimizer_bytes=sum(held.values()),
            activation_bytes=report.rank_bytes - rows - sum(held.values()),
            forward_seconds=trace.seconds[name or REST, "forward"],
            backward_seconds=trace.seconds[name or REST, "backward"],
            update_seconds=head.update_seconds(self.batch, self.ranks, self.hardware),
        )


class ModelPlans:
    """Makes plans of one parallel model: from its shapes before the split, and the first batch it received."""

    def __init__(self, model: nn.Module) -> None:
        """Keep a copy of ``model`` without values; call it before anything is replaced or sharded."""
        self._failure: Exception | None = None
        self._skeleton = model
        self._inputs: Any = None
        try:
            self._skeleton = skeleton_of(model)
        except Exception as exc:  # a user's module may raise anything when copied: it trains, and has no plan
            self._failure, self._skeleton = exc, nn.Module()

    def saw(self, inputs: Any, labels: Any) -> None:
        """Record a call of the model: a rank's batch. The first one that is not empty counts."""
        if self._inputs is None and self._failure is None:
            try:
                self._inputs = without_values((inputs, labels), None)
            except InvalidArgument:
                return

    def plan(self, model: ParallelModel, hardware: Hardware | None, optimizer: OptimizerMaker | None) -> Plan:
        """Plan for the recorded batch. Raises InvalidArgument without one, and for a model that has no plan."""
        if self._failure is not None:
            reason = str(self._failure) or type(self._failure).__name__
            kind = type(self._failure) if isinstance(self._failure, GeartrainError) else InvalidArgument
            raise kind(f"the model has no plan, for it cannot be copied without its values: {reason}")
        if self._inputs is None:
            raise InvalidArgument(
                "the model has no plan before its first batch in training; call it once, or ask gt.auto_plan with an "
                "example"
            )
        (inputs, labels), samples = self._inputs
        return PlanRequest(
            model=self._skeleton,
            scopes=model.scopes,
            ranks=model.mesh.world_size,
            hardware=hardware or Hardware.measure(alone=True, device=model.mesh.whole.device),
            inputs=inputs,
            labels=labels,
            batch=samples,
            loss=model.loss,
            optimizer=optimizer or torch.optim.AdamW,
            micro_batches=model.micro_batches,
        ).plan()


def buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups in which gradients that come in this order are averaged, from the second step on.

    A bucket is closed once it reaches its limit; each has one dtype.
    """
    closed: list[list[Tensor]] = []
    limits: dict[torch.dtype, int] = {}
    filling: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(tensor.nbytes for tensor in bucket) >= limits.get(parameter.dtype, _FIRST_BUCKET_BYTES):
            closed.append(filling.pop(parameter.dtype))
            limits[parameter.dtype] = _BUCKET_BYTES
    return closed + list(filling.values())


def _is_head_on_ranks(module: nn.Module) -> bool:
    if isinstance(module, HeadSkeleton):
        return module.settings is not None
    backend = backend_of(module)
    return backend is not None and backend.local is not None


def _shard_of(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """Return the largest shard of a parameter on the meta device: a part of its first dimension."""
    whole = parameter.shape or (1,)
    local = torch.empty(-(-whole[0] // ranks), *whole[1:], dtype=parameter.dtype, device="meta")
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _of_buffers(buffers: Sequence[Tensor], ranks: int) -> list[Collective]:
    """Return the broadcast of buffers, such as running means, from rank 0 in each forward pass: one for each dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for buffer in buffers:
        sizes[buffer.dtype] += buffer.nbytes
    return [
        Collective(kind="broadcast", what="buffers", phase="forward", bytes=size, ranks=ranks)
        for size in sizes.values()
        if size
    ]


def _of_sharded(shards: Sequence[nn.Parameter], ranks: int) -> list[Collective]:
    """Return the collectives of shards: gathered before their forward pass, gradients scattered after the backward."""
    gathered = sum(shard.nbytes for shard in shards) * ranks
    trained = sum(shard.nbytes for shard in shards if shard.requires_grad) * ranks
    return [
        Collective(kind="all-gather", what="parameters", phase="forward", bytes=gathered, ranks=ranks),
        Collective(kind="reduce-scatter", what="gradients", phase="backward", bytes=trained, ranks=ranks),
    ][: 2 * bool(shards)]
