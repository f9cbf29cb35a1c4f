"""Choice of replicated and split parts by memory and expected step time, with reasons."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from geartrain.ams.programs.selection import Selection
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.plan.build import OptimizerMaker, PlanRequest
from geartrain.bridge.parallel.plan.dry import HeadSkeleton, skeleton_of
from geartrain.bridge.parallel.plan.hardware import Hardware
from geartrain.bridge.parallel.plan.meta import MetaMode, meta_like
from geartrain.bridge.parallel.plan.plan import Plan, bytes_text, seconds_text
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split
from geartrain.bridge.rows.stand_in import named_dense_parameters

_MAX_SPLIT = 3
"""Layers that are tried, largest first: each costs a dry run."""
_MIN_PART = 0.05
"""Share of the model's parameters below which a layer is not worth splitting."""


def auto_plan(
    model: nn.Module,
    ranks: int | Mesh,
    example: Any,
    *,
    loss: LossFunction | None = None,
    batch: int | None = None,
    hardware: Hardware | None = None,
    optimizer: OptimizerMaker = torch.optim.AdamW,
) -> Plan:
    """Choose the fastest of data parallel, sharded, split and hybrid that fits into memory.

        plan = gt.auto_plan(model, mesh, (images, labels), loss=nn.CrossEntropyLoss())
        print(plan.explain())
        model = gt.parallelize(model, mesh, plan.scopes, loss=nn.CrossEntropyLoss())

    Nothing is trained or allocated: each candidate runs once on the meta device. Candidates are: all replicated; all
    sharded (FSDP2); up to three of the largest splittable layers split, alone and together, the rest replicated.
    ``plan.reasons`` has each candidate with its cost.

    Args:
        model: An ``nn.Module``, on any device or on the meta device; it is not changed. Its forward must run without
            values.
        ranks: Number of ranks, or a :class:`Mesh` without stages.
        example: One rank's batch, as the parallel model is called: ``(inputs, labels)``, or inputs alone without
            ``loss``. Only shapes and dtypes count.
        loss: As in :func:`parallelize`.
        batch: Samples of a rank; None: those of the example.
        hardware: Rates of the machine. None: measured here, in seconds, if this is the training mesh: then every rank
            calls it.
        optimizer: Makes the optimizer of parameters, as ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)``: its
            state and step are counted.

    Raises InvalidArgument for a model that needs values, if nothing fits (with the memory of each), and if hardware
    must be given.
    """
    count = _count_of(ranks)
    hardware = hardware or _measured(count)
    tried, refused = _planned_candidates(model, count, hardware, example, batch, loss=loss, optimizer=optimizer)
    fitting = {name: plan for name, plan in tried.items() if plan.fits}
    lines = [_line(name, plan) for name, plan in tried.items()] + refused
    if not fitting:
        raise InvalidArgument(
            f"nothing fits into {bytes_text(hardware.memory_bytes)} a rank on {counted(count, 'rank')}: "
            f"{'; '.join(lines)}. Use more ranks, a smaller batch, or an optimizer with less state"
        )
    chosen, *others = sorted(fitting, key=lambda name: fitting[name].step.seconds)
    plan = fitting[chosen]
    why = "the only one that fits" if len(tried) > 1 else "there is nothing else to try"
    if others:
        best = fitting[others[0]]
        why = (
            f"the shortest step of those that fit: {seconds_text(plan.step.seconds)}, the next one "
            f"{seconds_text(best.step.seconds)}; a rank sends {bytes_text(plan.sent_bytes)}, there "
            f"{bytes_text(best.sent_bytes)}"
        )
    return replace(plan, reasons=(f"chosen: {chosen}, {why}", *lines))


def plan_classifier(
    backbone: nn.Module,
    images: Tensor,
    *,
    num_classes: int,
    dim: int,
    ranks: int,
    batch: int,
    hardware: Hardware,
    select: Selection,
    row_optimizer: RowOptimizerSpec,
    config: HeadConfig,
    sub_centers: int = 1,
    micro_batches: int = 1,
    sparsity: float | None = None,
    compare: bool = False,
) -> Plan:
    """Plan a step of ``backbone`` under DDP and a ``ClassHead`` with ``rows="ranks"``; nothing is allocated.

    Args:
        backbone: Returns features [B, D] of images; best on the meta device.
        images: An example [n, …]; only its shape and dtype count.
        num_classes: Classes of the head.
        dim: Width D of features.
        ranks: Number of ranks that train together.
        batch: Samples of a rank.
        hardware: Rates of the machine.
        select: Which classes of the head are active.
        row_optimizer: Optimizer of the head's rows.
        config: The head's other settings.
        sub_centers: Centers of each class.
        micro_batches: Parts of a step, as in :class:`MicroBatches`; those of the rivals are not overlapped.
        sparsity: Sparsity of the backbone's gradients, as in :class:`TopKGradients`; of the rivals', too.
        compare: Whether ``reasons`` has the costs of the rivals from :func:`auto_plan`: the same backbone and an
            ``nn.Linear`` with cross entropy, replicated, split and sharded, with every class active in every step.

    Raises InvalidArgument for a backbone that does not return features [B, D], or that needs values.
    """
    num_classes, dim = integer("num_classes", num_classes, 1), integer("dim", dim, 1)
    _require_features(backbone, images, dim)
    settings = {
        "num_classes": num_classes,
        "dim": dim,
        "sub_centers": sub_centers,
        "bias": False,
        "optimizer": row_optimizer,
        "select": select,
        "config": config,
    }
    example = (images, torch.zeros(len(images), dtype=torch.int64))
    ours = PlanRequest.of(
        _Classifier(backbone, HeadSkeleton("head", settings)),
        {"backbone": Replicate(), "head": Split()},
        example,
        batch,
        ranks=ranks,
        hardware=hardware,
        loss=None,
        optimizer=_AdamW,
        micro_batches=micro_batches,
        sparsity=sparsity,
    ).plan()
    if not compare:
        return ours
    with torch.device("meta"):
        rival = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(dim, num_classes)))
    tried, refused = _planned_candidates(
        rival, ranks, hardware, example, batch, loss=nn.CrossEntropyLoss(), sparsity=sparsity
    )
    rivals = [_line(name, plan) for name, plan in tried.items()] + refused
    return replace(ours, reasons=(_line("ClassHead on the ranks", ours), *(f"nn.Linear, {rival}" for rival in rivals)))


class _AdamW:
    """Stand-in that steps as ``torch.optim.AdamW``, whose construction imports torch's compiler for a second."""

    has_state = True
    """It is made with the state, so that the first step is as the second."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.state = {each: {name: meta_like(each) for name in ("mean", "square")} for each in parameters}
        self._steps = [torch.ones(()) for _ in parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients: list[Any] = [parameter.grad for parameter in self.state]
        means, squares = map(list, zip(*(state.values() for state in self.state.values()), strict=True))
        settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        adamw([*self.state], gradients, means, squares, [], self._steps, amsgrad=False, maximize=False, **settings)


class _Classifier(nn.Module):
    """Backbone with a head that takes labels, and returns the loss."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(images), labels)
        return loss


def _require_features(backbone: nn.Module, images: Tensor, dim: int) -> None:
    try:
        with torch.no_grad(), MetaMode():
            found = backbone(images)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
        raise InvalidArgument(
            f"{type(backbone).__name__} does not take images {list(images.shape)} without values: {exc}. Give the "
            "number of channels and the size of images that it is made for"
        ) from exc
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != [len(images), dim]:
        raise InvalidArgument(f"{type(backbone).__name__} gives {shape} of a batch; it must give features [B, {dim}]")


def _planned_candidates(
    model: nn.Module, ranks: int, hardware: Hardware, example: Any, batch: int | None, **settings: Any
) -> tuple[dict[str, Plan], list[str]]:
    """Return the candidate plans by name, and a line for each candidate that is impossible.

    Raises InvalidArgument for a model that cannot be planned at all.
    """
    skeleton = skeleton_of(model)
    tried: dict[str, Plan] = {}
    refused: list[str] = []
    first: InvalidArgument | None = None
    for name, scopes in _candidates(skeleton, ranks):
        request = PlanRequest.of(skeleton, scopes, example, batch, ranks=ranks, hardware=hardware, **settings)
        try:
            tried[name] = request.plan()
        except InvalidArgument as exc:
            first = first or exc
            refused.append(f"{name}: not possible ({str(exc).partition(':')[0]})")
    if first is not None and not tried:
        raise first
    return tried, refused


def _line(name: str, plan: Plan) -> str:
    """Return the main figures of a plan, in a line."""
    fits = "" if plan.fits else ", does not fit"
    return (
        f"{name}: {seconds_text(plan.step.seconds)} a step, {bytes_text(plan.rank_bytes)} a rank{fits}, sends "
        f"{bytes_text(plan.sent_bytes)}"
    )


def _candidates(model: nn.Module, ranks: int) -> Iterator[tuple[str, dict[str, Scope]]]:
    heads: dict[str, Scope] = {
        name: Split() for name, module in model.named_modules() if isinstance(module, HeadSkeleton)
    }
    yield "everything replicated", _with_rest(model, heads, Replicate())
    if ranks == 1:
        return
    layers = _splittable(model)
    for number in range(1, 2 ** len(layers)):
        names = [name for place, name in enumerate(layers) if number >> place & 1]
        scopes = _with_rest(model, {**heads, **{name: Split() for name in names}}, Replicate())
        rest = "" if len(scopes) == len(names) + len(heads) else ", the rest replicated"
        yield f"{', '.join(name or 'model' for name in names)} split{rest}", scopes
    if next(named_dense_parameters(model), None) is not None:
        sharded = _with_rest(model, heads, Replicate(shard=True))
        if "" not in sharded or not heads:
            yield "everything sharded", sharded


def _splittable(model: nn.Module) -> list[str]:
    """Return names of the largest splittable layers, by size."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    layers = {name: size(part) for name, part in model.named_modules() if type(part) in (nn.Linear, nn.Embedding)}
    large = [name for name in layers if layers[name] >= _MIN_PART * size(model)]
    return sorted(large, key=layers.__getitem__, reverse=True)[:_MAX_SPLIT]


def _with_rest(model: nn.Module, split: Mapping[str, Scope], rest: Replicate) -> dict[str, Scope]:
    """Return ``split``, and ``rest`` for all other parameters: by names of the model's own parts, or of all of it."""
    if "" in split:
        return dict(split)
    parts = {
        name: child for name, child in model.named_children() if next(named_dense_parameters(child), None) is not None
    }
    is_inside = any("." in name for name in split) or any(True for _ in model.parameters(recurse=False))
    num_parameters = sum(1 for _ in named_dense_parameters(model))
    shared = sum(sum(1 for _ in named_dense_parameters(part)) for part in parts.values()) != num_parameters
    if is_inside or shared or isinstance(model, nn.Linear | nn.Embedding):
        return {"": rest, **split}
    return {name: split.get(name, rest) for name in {**parts, **split}}


def _count_of(ranks: int | Mesh) -> int:
    if isinstance(ranks, Mesh):
        if ranks.stages:
            raise InvalidArgument(f"{ranks!r} has stages, which say where each part is; auto_plan chooses that itself")
        return ranks.world_size
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgument(f"ranks is {quoted(ranks)}; it must be a number of ranks, or what gt.mesh() returns")
    return ranks


def _measured(ranks: int) -> Hardware:
    here = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != here:
        raise InvalidArgument(
            f"hardware is not given, and {counted(ranks, 'rank')} cannot be measured here, where there are {here}; "
            'give hardware=gt.Hardware.named("h200"), or one of your own'
        )
    return Hardware.measure()
