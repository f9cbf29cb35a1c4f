"""From a model and its scopes to a plan: run it dry, count what it does, divide by the hardware's rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.plan.costs import replicas
from geartrain.bridge.parallel.plan.costs.collectives import Collective
from geartrain.bridge.parallel.plan.costs.dry_model import dry_model
from geartrain.bridge.parallel.plan.costs.head_costs import HeadSkeleton
from geartrain.bridge.parallel.plan.costs.skeleton import without_values
from geartrain.bridge.parallel.plan.costs.trace import REST, Recorded, StepTrace, traced_step, traced_update
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.plan.planned import PlannedCollective, PlannedPart
from geartrain.bridge.parallel.plan.timeline import expected_steps
from geartrain.bridge.parallel.scopes import Scope, Split
from geartrain.bridge.parallel.split.heads import backend_of
from geartrain.bridge.parallel.split.layer import SplitLayer

OptimizerMaker = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is made of; :meth:`plan` makes it."""

    model: nn.Module
    """Itself, or its skeleton; its values are not looked at."""
    scopes: Mapping[str, Scope]
    ranks: int
    hardware: Hardware
    inputs: Any
    """What the model is called with, a rank's batch: tensors on the meta device."""
    labels: Any
    """For the loss; None where the model returns its own."""
    batch: int
    """Samples of a rank."""
    loss: LossFunction | None
    optimizer: OptimizerMaker
    micro_batches: int = 1
    sparsity: float | None = None

    def __post_init__(self) -> None:
        """Check what is no module."""
        integer("ranks", self.ranks, 1)
        integer("batch", self.batch, 1)
        integer("micro_batches", self.micro_batches, 1)
        if self.sparsity is not None and not 0 <= real_number("sparsity", self.sparsity) < 1:
            raise InvalidArgument(f"sparsity is {self.sparsity!r}; it must be in [0, 1), or None: gradients are dense")

    def changed(self, *, batch: int | None = None, **fields: Any) -> PlanRequest:
        """The same with another batch, or other fields."""
        if batch is None:
            return replace(self, **fields)
        (inputs, labels), _ = without_values((self.inputs, self.labels), batch)
        return replace(self, inputs=inputs, labels=labels, batch=batch, **fields)

    def plan(self) -> Plan:
        """Run it dry. Raises InvalidArgument for scopes that do not fit, and a model that needs values."""
        heads = [name for name, module in self.model.named_modules() if _is_head_on_ranks(module)]
        unnamed: dict[str, Scope] = {name: Split() for name in heads if name not in self.scopes}
        if unnamed:  # they have no parameters, so that parallelize takes them without a scope
            return replace(self, scopes={**self.scopes, **unnamed}).plan()
        trace = StepTrace()
        dry = dry_model(self.model, self.scopes, self.loss, self.ranks, trace)
        parts = [name for name in self.scopes if name]
        recorded = traced_step(
            dry.module, parts, lambda: dry(self.inputs, self.labels), (self.inputs, self.labels), trace
        )
        return _planned(self, dry, recorded)


def _is_head_on_ranks(module: nn.Module) -> bool:
    if isinstance(module, HeadSkeleton):
        return module.is_on_ranks
    backend = backend_of(module)
    return backend is not None and not backend.needs_cluster


def request_for(
    model: nn.Module,
    scopes: Mapping[str, Scope],
    ranks: int,
    hardware: Hardware,
    example: Any,
    *,
    batch: int | None,
    loss: LossFunction | None,
    optimizer: OptimizerMaker,
    micro_batches: int = 1,
    sparsity: float | None = None,
) -> PlanRequest:
    """Of an ``example`` as ``ParallelModel`` is called: (inputs, labels), or inputs where the loss is its own.

    Raises InvalidArgument for an example without tensors, or without labels where a loss needs them.
    """
    inputs, samples = without_values(example, batch)
    labels = None
    if loss is not None:
        if not isinstance(inputs, tuple | list) or len(inputs) != 2:
            raise InvalidArgument("example must be (inputs, labels), for the loss takes labels; inputs may be a tuple")
        inputs, labels = inputs
    return PlanRequest(
        model=model,
        scopes=dict(scopes),
        ranks=ranks,
        hardware=hardware,
        inputs=inputs,
        labels=labels,
        batch=samples,
        loss=loss,
        optimizer=optimizer,
        micro_batches=micro_batches,
        sparsity=sparsity,
    )


@dataclass(kw_only=True)
class _Costs:
    """Of one scope: what its parameters add to what was recorded."""

    part: PlannedPart
    collectives: list[Collective]
    replicated: list[nn.Parameter]
    """Those that are averaged with the other scopes' together."""
    buffers: list[Any]


def _planned(request: PlanRequest, dry: ParallelModel, recorded: Recorded) -> Plan:
    counted = {
        id(parameter)
        for name, scope in request.scopes.items()
        if isinstance(scope, Split)
        for parameter in dry.module.get_submodule(name).parameters()
    }
    costs = [
        _costs_of(request, name, scope, dry.module.get_submodule(name), counted, recorded)
        for name, scope in request.scopes.items()
    ]
    found = [pair for one in recorded.collectives for pair in _in_micro_batches(one, request.micro_batches)]
    found += [(one.part.name, made) for one in costs for made in one.collectives]
    averages: list[tuple[Sequence[Tensor], Collective]] = []
    replicated = [parameter for one in costs for parameter in one.replicated]
    if request.ranks > 1 and any(one.requires_grad for one in replicated):
        closed = replicas.buckets(replicas.ready_order(replicated))
        averages = [one for bucket in closed for one in replicas.averages(bucket, request.ranks, request.sparsity)]
        where = " + ".join(one.part.name or "model" for one in costs if one.replicated)
        buffers = [buffer for one in costs for buffer in one.buffers]
        found += [(where, one) for one in replicas.buffer_broadcasts(buffers, request.ranks)]
        found += [(where, one) for _, one in averages]
    parts = tuple(one.part for one in costs)
    if "" not in request.scopes:
        parts += (_part("", "", request, recorded, [], [], buckets=averages),)
    else:
        parts = tuple(_with_buckets(part, request, averages) if not part.name else part for part in parts)
    overlapped, plain = expected_steps(
        parts,
        found,
        averages,
        [(one.part, [two for two in one.replicated if two.requires_grad]) for one in costs if one.replicated],
        request.hardware,
        request.micro_batches,
    )
    return Plan(
        scopes=request.scopes,
        hardware=request.hardware,
        ranks=request.ranks,
        batch=request.batch,
        parts=parts,
        collectives=_counted(found, request.hardware),
        step=overlapped,
        step_without_overlap=plain,
        request=request,
    )


def _counted(found: Sequence[tuple[str, Collective]], hardware: Hardware) -> tuple[PlannedCollective, ...]:
    """Alike ones together, those of the forward pass first."""
    counts = Counter(found)
    return tuple(
        PlannedCollective(
            part="" if part == REST else part,
            times=times,
            collective=one,
            seconds=times * one.seconds(hardware),
        )
        for (part, one), times in sorted(counts.items(), key=lambda item: item[0][1].phase == "backward")
    )


def _in_micro_batches(one: tuple[str, Collective], number: int) -> list[tuple[str, Collective]]:
    """Features and their gradients travel once for each; labels and sums of the softmax for all of them at once."""
    part, collective = one
    if number == 1 or not collective.is_of_features:
        return [one]
    return [(part, replace(collective, bytes=-(-collective.bytes // number)))] * number


def _costs_of(
    request: PlanRequest, name: str, scope: Scope, module: nn.Module, counted: set[int], recorded: Recorded
) -> _Costs:
    """Of the scope ``name``; ``counted`` are the ids of parameters that split layers or scopes before it have."""
    if isinstance(module, HeadSkeleton):
        return _Costs(part=_head_part(request, name, module, recorded), collectives=[], replicated=[], buffers=[])
    if isinstance(scope, Split):
        parameters = list(module.parameters())
        assert isinstance(module, SplitLayer)
        rows = module.shard.num / max(1, module.shard.num_local)
        part = _part(name, "split", request, recorded, parameters, parameters, whole=rows)
        return _Costs(part=part, collectives=[], replicated=[], buffers=[])
    parameters = [one for one in module.parameters() if id(one) not in counted]
    counted.update(map(id, parameters))
    if scope.shard and request.ranks > 1:
        local = [replicas.shard_of(one, request.ranks) for one in parameters]
        part = _part(name, "sharded", request, recorded, parameters, local)
        collectives = replicas.sharded_collectives(parameters, request.ranks)
        return _Costs(part=part, collectives=collectives, replicated=[], buffers=[])
    part = _part(name, "replicated", request, recorded, parameters, parameters)
    return _Costs(part=part, collectives=[], replicated=parameters, buffers=list(module.buffers()))


def _part(
    name: str,
    scope: str,
    request: PlanRequest,
    recorded: Recorded,
    parameters: Sequence[nn.Parameter],
    local: Sequence[nn.Parameter],
    *,
    whole: float = 1.0,
    buckets: Sequence[tuple[Sequence[Tensor], Collective]] = (),
) -> PlannedPart:
    hardware, key = request.hardware, name or REST
    update, state_bytes = traced_update([one for one in local if one.requires_grad], request.optimizer)
    gradients = sum(one.nbytes for one in local if one.requires_grad)
    travels = scope == "replicated" and request.ranks > 1
    gathered = sum(one.nbytes for one in parameters) if scope == "sharded" else 0
    part = PlannedPart(
        name=name,
        scope=scope,
        num_parameters=round(sum(one.numel() for one in parameters) * whole),
        parameter_bytes=sum(one.nbytes for one in local),
        gradient_bytes=gradients * (1 + travels),
        optimizer_bytes=state_bytes,
        activation_bytes=recorded.kept_bytes.get(key, 0) + gathered,
        forward_seconds=recorded.work(key, "forward").seconds(hardware),
        backward_seconds=recorded.work(key, "backward").seconds(hardware),
        update_seconds=update.seconds(hardware),
    )
    return _with_buckets(part, request, buckets)


def _with_buckets(
    part: PlannedPart, request: PlanRequest, buckets: Sequence[tuple[Sequence[Tensor], Collective]]
) -> PlannedPart:
    work = [
        one
        for bucket, collective in buckets
        for one in replicas.bucket_work(bucket, is_sparse=collective.kind == "all-gather")
    ]
    seconds = sum(one.seconds(request.hardware) for one in work)
    return replace(part, backward_seconds=part.backward_seconds + seconds)


def _head_part(request: PlanRequest, name: str, head: HeadSkeleton, recorded: Recorded) -> PlannedPart:
    report, key = head.memory(request.batch, request.ranks), name or REST
    held = {part.name: part.bytes for part in report.parts if part.holder == "rank" and part.standing}
    rows = held.pop("rows")
    return PlannedPart(
        name=name,
        scope="split",
        num_parameters=report.num_classes * head.settings.width,
        parameter_bytes=rows,
        gradient_bytes=0,
        optimizer_bytes=sum(held.values()),
        activation_bytes=report.rank_bytes - rows - sum(held.values()),
        forward_seconds=recorded.work(key, "forward").seconds(request.hardware),
        backward_seconds=recorded.work(key, "backward").seconds(request.hardware),
        update_seconds=sum(one.seconds(request.hardware) for one in head.update(request.batch, request.ranks)),
    )
