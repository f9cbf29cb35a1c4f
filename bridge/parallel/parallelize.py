"""``gt.parallelize``: turns a module into one whose parts are replicated or split over a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.mixed_optimizers import allow_mixed_optimizers
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.plan.build import ModelPlans
from geartrain.bridge.parallel.replicated import replicated, require_first_values
from geartrain.bridge.parallel.scopes import Scope, ScopedModel, marked_scopes, replaced, scoped
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.layer import SplitLayer
from geartrain.bridge.parallel.split.registry import SplitPlace, check_can_split, split_layer
from geartrain.bridge.parallel.staged.staging import check_stages, stage


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    scopes: Mapping[str, Scope] | None = None,
    *,
    loss: LossFunction | None = None,
    seed: int = 0,
    micro_batches: int = 1,
) -> ParallelModel:
    """Train ``model`` on the ranks of ``mesh``: replicate some of its parts, split others.

        model = gt.parallelize(Classifier(), gt.mesh(), {"backbone": gt.Replicate(), "head": gt.Split()},
                               loss=nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(images, labels).backward()

    The model object stays, with its names; split layers are replaced by ones with this rank's rows. Every rank calls it
    with the same model and arguments. Values are rank 0's. Tensors on the meta device are allocated here, on the device
    of the mesh, split and sharded parts only with their own rows: values are those of ``reset_parameters`` (of
    nn.Linear and nn.Embedding the same distributions), a function of ``seed`` and names alone, whatever the number of
    ranks and the scopes.

    Args:
        model: An ``nn.Module``, on its device or on the meta device. Move it before, not after.
        mesh: From :func:`geartrain.mesh`. With stages the ranks of the first have the samples; those of each other one
            have the scopes with its number, called in their order, and call ``model(None, None)``
            (:class:`~geartrain.bridge.parallel.staged.staged_model.StagedModel`).
        scopes: By name of a module, ``gt.Replicate()`` or ``gt.Split()``. Every parameter is in one. A split layer may
            lie inside a replicated part. None: what :func:`geartrain.replicate` and :func:`geartrain.split` marked.
        loss: Function of (model output, labels), such as ``nn.CrossEntropyLoss()``: with "mean" and "sum" over the
            samples of all ranks. None: the model returns its loss itself.
        seed: Seed of first values on the meta device.
        micro_batches: Parts of each batch, whose features travel while the rest of the model computes others (4 to 8),
            or with stages, parts on which the stages work at once: for models that return the logits of one split
            ``nn.Linear``, with a ``loss``, and for any model in stages. Loss and gradients are the same to rounding,
            except that batch norm and dropout see smaller batches. Memory is that of the whole batch. For class heads
            use :class:`geartrain.MicroBatches`.

    Costs an exchange and an all-gather of the arguments, and for values a broadcast of replicated and a send of split
    parts.

    Raises:
        InvalidArgument: A scope, a layer that cannot be split, a parameter without a scope, or a model that is parallel
            already.
        SpecMismatch: Ranks were given different models, scopes or losses; on every rank.
        SyncError: Another rank raised one of these.
    """
    if not isinstance(mesh, Mesh):
        raise InvalidArgument(f"mesh is {quoted(mesh)}; it must be what gt.mesh() returns")
    link = mesh.whole.link

    def look_up() -> tuple[ScopedModel, dict[str, Any]]:
        found = _looked_up(model, mesh, scopes, loss, seed)
        _check_micro_batches(micro_batches, found, mesh, loss)
        return found, {**_description(model, found, loss, seed), "micro_batches": micro_batches}

    found, description = link.run_together(look_up, "gt.parallelize() changed nothing")
    link.require_equal(description, "gt.parallelize()")
    if mesh.world_size > 1:
        allow_mixed_optimizers()
    if mesh.stages:
        assert loss is not None
        return stage(model, mesh, found, loss, seed, micro_batches)
    plans = ModelPlans(model)
    group = mesh.whole
    agreement = StepAgreement(link)
    split_parameters: set[int] = set()
    for name, module in found.split.items():
        if not check_can_split(name, module, group.ranks):
            continue
        layer = split_layer(SplitPlace(name, group, agreement, seed), module)
        layer.train(module.training)
        model = replaced(model, name, layer)
        split_parameters.update(id(parameter) for parameter in layer.parameters())
    replicas = replicated(model, found.replicated, group, seed, split_parameters)
    return ParallelModel(model, mesh, found.scopes, loss, replicas, agreement, plans, micro_batches)


def _looked_up(
    model: nn.Module, mesh: Mesh, scopes: Mapping[str, Scope] | None, loss: LossFunction | None, seed: int
) -> ScopedModel:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {quoted(model)}; it must be a torch.nn.Module")
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel) or hasattr(part, "set_requires_gradient_sync"):  # fully_shard
            raise InvalidArgument(
                f"{name or 'the model'!r} is a {type(part).__name__}, whose gradients are averaged already. Give "
                "gt.parallelize the module without it, with gt.Replicate() or gt.Replicate(shard=True) as its scope"
            )
        if isinstance(part, ParallelModel | SplitLayer):
            raise InvalidArgument(
                f"{name or 'the model'!r} is a {type(part).__name__}: gt.parallelize had it before. Call it once, with "
                "all scopes, on a model that is not parallel"
            )
    if loss is not None and not callable(loss):
        raise InvalidArgument(f"loss is {quoted(loss)}; it must be a function of (output, labels), or None")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InvalidArgument(
            "the loss has parameters, which nothing would average over the ranks; make it part of the model"
        )
    integer("seed", seed, 0)
    found = scoped(model, marked_scopes(model) if scopes is None else scopes)
    for name, module in found.split.items():
        check_can_split(name, module, mesh.whole.ranks)
    require_first_values(found.replicated, found.split.values())
    if mesh.stages:
        check_stages(model, mesh, found, loss)
    return found


def _check_micro_batches(count: int, found: ScopedModel, mesh: Mesh, loss: LossFunction | None) -> None:
    if integer("micro_batches", count, 1) == 1 or mesh.stages:
        return
    others = [name for name, module in found.split.items() if type(module) is not nn.Linear]
    if loss is None or others or len(found.split) != 1:
        raise InvalidArgument(
            f"micro_batches is {count}; without stages it takes one split nn.Linear, whose logits the model returns, "
            f"and a loss: here are split {sorted(found.split)} and {'no' if loss is None else 'a'} loss. Leave it out; "
            "with a class head take gt.MicroBatches"
        )


def _description(model: nn.Module, found: ScopedModel, loss: LossFunction | None, seed: int) -> dict[str, Any]:
    """Return the settings on which the ranks must agree."""
    return {
        "scopes": {name: repr(scope) for name, scope in found.scopes.items()},
        "stages": {name: scope.stage for name, scope in found.scopes.items()},
        "parameters": {
            name: f"{tuple(part.shape)} {part.dtype} {part.device.type} {'trained' if part.requires_grad else 'frozen'}"
            for name, part in model.named_parameters()
        },
        "loss": _described(loss),
        "seed": seed,
    }


def _described(loss: LossFunction | None) -> str:
    if not isinstance(loss, nn.Module):
        return getattr(loss, "__qualname__", type(loss).__qualname__)
    settings = {
        key: _setting(value) for key, value in vars(loss).items() if not key.startswith("_") and key != "training"
    }
    state = {key: value for key, value in loss.state_dict().items() if isinstance(value, Tensor)}
    digests = {
        key: xxhash.xxh3_64_hexdigest(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for key, value in state.items()
    }
    return f"{type(loss).__qualname__} {settings} {digests}"


def _setting(value: Any) -> str:
    """Return a value's text for comparison between ranks; of functions and objects the name, as addresses differ."""
    if isinstance(value, str | int | float | bool | tuple | list | dict | type(None)):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
