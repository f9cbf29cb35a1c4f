"""Choose what is replicated and what is split, by memory and by the expected step, and say why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.plan.build import OptimizerMaker, request_for
from geartrain.bridge.parallel.plan.costs.head_costs import HeadSkeleton
from geartrain.bridge.parallel.plan.costs.skeleton import skeleton_of
from geartrain.bridge.parallel.plan.explanation import bytes_text, seconds_text
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Replicate, Scope, Split

_MOST_SPLIT = 3
"""Layers that are tried, the largest first: each costs a dry run."""
_LEAST_PART = 0.05
"""Of the model's parameters: smaller layers are not worth splitting."""


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
    """Choose between data parallel, sharded, split and hybrid: what fits into memory and has the shortest step.

        plan = gt.auto_plan(model, mesh, (images, labels), loss=nn.CrossEntropyLoss())
        print(plan.explain())
        model = gt.parallelize(model, mesh, plan.scopes, loss=nn.CrossEntropyLoss())

    Nothing is trained or allocated: each candidate runs once on the meta device. Tried are: everything replicated;
    everything sharded (FSDP2); up to three of the largest layers that can be split, alone and together, the rest
    replicated. What was tried, and what each would cost, is in ``plan.reasons``.

    Args:
        model: An ``nn.Module``, on any device or on the meta device; it is left as it is. Its forward must run without
            values.
        ranks: How many, or a :class:`Mesh` without stages.
        example: One rank's batch as the parallel model is called: ``(inputs, labels)``, or inputs alone without
            ``loss``. Only shapes and dtypes count.
        loss: As in :func:`parallelize`.
        batch: Samples of a rank; None: those of the example.
        hardware: What to divide by. None: measured here, in seconds, if this is the mesh that trains: then every rank
            calls it.
        optimizer: Makes the optimizer of parameters, as ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)``: its
            state and step are counted.

    Raises InvalidArgument for a model that needs values, if nothing fits (it says what each would take), and where
    hardware has to be given.
    """
    count = _count_of(ranks)
    hardware = hardware or _measured(count)
    tried, refused = planned_candidates(model, count, hardware, example, loss=loss, batch=batch, optimizer=optimizer)
    fitting = {name: plan for name, plan in tried.items() if plan.fits}
    lines = [plan_line(name, plan) for name, plan in tried.items()] + refused
    if not fitting:
        raise InvalidArgument(
            f"nothing fits into {bytes_text(hardware.memory_bytes)} a rank on {counted(count, 'rank')}: "
            f"{'; '.join(lines)}. Use more ranks, a smaller batch, or an optimizer with less state"
        )
    chosen = min(fitting, key=lambda name: fitting[name].step.seconds)
    return replace(fitting[chosen], reasons=(f"chosen: {chosen}, {_why(chosen, fitting, tried)}", *lines))


def planned_candidates(
    model: nn.Module,
    ranks: int,
    hardware: Hardware,
    example: Any,
    *,
    loss: LossFunction | None,
    batch: int | None,
    optimizer: OptimizerMaker,
    sparsity: float | None = None,
) -> tuple[dict[str, Plan], list[str]]:
    """The plans that :func:`auto_plan` chooses from, by what they are called; a line for each that is not possible.

    Raises InvalidArgument for a model that cannot be planned at all.
    """
    skeleton = skeleton_of(model)
    tried: dict[str, Plan] = {}
    refused: list[str] = []
    for name, scopes in _candidates(skeleton, ranks):
        request = request_for(
            skeleton,
            scopes,
            ranks,
            hardware,
            example,
            batch=batch,
            loss=loss,
            optimizer=optimizer,
            sparsity=sparsity,
        )
        try:
            tried[name] = request.plan()
        except InvalidArgument as exc:
            if not tried and "replicated" in name:
                raise  # the model itself cannot be planned
            refused.append(f"{name}: not possible ({str(exc).partition(':')[0]})")
    return tried, refused


def _why(chosen: str, fitting: Mapping[str, Plan], tried: Mapping[str, Plan]) -> str:
    others = [plan for name, plan in fitting.items() if name != chosen]
    if not others:
        return "the only one that fits" if len(tried) > 1 else "there is nothing else to try"
    best, plan = min(others, key=lambda one: one.step.seconds), fitting[chosen]
    return (
        f"the shortest step of those that fit: {seconds_text(plan.step.seconds)}, the next one "
        f"{seconds_text(best.step.seconds)}; a rank sends {bytes_text(plan.sent_bytes)}, there "
        f"{bytes_text(best.sent_bytes)}"
    )


def plan_line(name: str, plan: Plan) -> str:
    """What matters of a plan, in a line."""
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
    if next(model.parameters(), None) is not None:
        sharded = _with_rest(model, heads, Replicate(shard=True))
        if "" not in sharded or not heads:
            yield "everything sharded", sharded


def _splittable(model: nn.Module) -> list[str]:
    """Names of the largest layers that could be split, by size."""
    sizes = {
        name: sum(one.numel() for one in module.parameters())
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
    }
    whole = sum(one.numel() for one in model.parameters())
    large = [name for name, size in sizes.items() if size >= _LEAST_PART * whole]
    return sorted(large, key=lambda name: -sizes[name])[:_MOST_SPLIT]


def _with_rest(model: nn.Module, split: Mapping[str, Scope], rest: Replicate) -> dict[str, Scope]:
    """``split``, and ``rest`` for all other parameters: by the names of the model's own parts, or as a whole."""
    if "" in split:
        return dict(split)
    parts = {name: child for name, child in model.named_children() if next(child.parameters(), None) is not None}
    is_inside = any("." in name for name in split) or any(True for _ in model.parameters(recurse=False))
    shared = sum(sum(1 for _ in one.parameters()) for one in parts.values()) != sum(1 for _ in model.parameters())
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
