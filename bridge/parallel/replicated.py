"""Replicated parts of a model, under DistributedDataParallel or ``fully_shard``."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import lost_ranks_named
from geartrain.bridge.parallel.averaging import AverageHook, BackwardPasses, name_lost_ranks
from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.scopes import Replicate, called_parts
from geartrain.bridge.parallel.split.first_values import first_rows, has_first_rows
from geartrain.bridge.parallel.split.shard import RowShard, local_part
from geartrain.bridge.rows.stand_in import StandIn, named_dense_parameters


class Replicas:
    """Replicated parameters, and the averaging of their gradients.

    Attributes: ``ddp``, one DistributedDataParallel of all parameters that are whole on every rank, which takes a
    communication hook before the first step; None with one rank, or without such parameters. ``sharded``: the modules
    under ``fully_shard``.
    """

    def __init__(
        self, group: MeshGroup, whole: Mapping[str, nn.Module], sharded: Iterable[nn.Module], split: set[int]
    ) -> None:
        """``split`` are the ids of parameters in ``whole`` modules that are not replicated. Collective.

        All ranks start with rank 0's values.
        """
        self.sharded = list(sharded)
        self._link, self._modules = group.link, [*whole.values(), *self.sharded]
        self._not_gathered: set[int] = set()
        for module in self.sharded:
            module.register_forward_hook(lambda module, _, __: self._not_gathered.discard(id(module)))
        self.ddp: DistributedDataParallel | None = None
        self._passes = BackwardPasses([])
        self._hook: AverageHook | None = None
        """Hook to register, unless the user registers another one before the first step."""
        self._names: list[str] = []
        """Names of the parameters of ``ddp``, in its numbering."""
        self._frozen: dict[str, nn.Parameter] = {}
        """Whole parameters that DDP does not average, as they were frozen when it was made; by name."""
        if group.link.world_size == 1:
            return
        parameters = [
            parameter
            for parameter in _distinct(whole.values(), nn.Module.parameters)
            if id(parameter) not in split and not isinstance(parameter, StandIn)
        ]
        buffers = _distinct(whole.values(), nn.Module.buffers)
        names = {id(parameter): f"{name}.{key}" for name, part in _named(whole) for key, parameter in _own(part)}
        names = {key: name.removeprefix(".") for key, name in names.items()}
        self._names = [names[id(parameter)] for parameter in parameters if parameter.requires_grad]
        self._frozen = {names[id(parameter)]: parameter for parameter in parameters if not parameter.requires_grad}
        if any(parameter.requires_grad for parameter in parameters):
            holder = _Holder(parameters, buffers)
            self.ddp = DistributedDataParallel(holder, process_group=group.process_group)
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._passes = BackwardPasses(trained)
            if all(parameter.device.type == "cpu" for parameter in trained):
                self._hook = AverageHook(group.process_group)
        else:
            for tensor in [*parameters, *buffers]:
                group.link.broadcast_from_first(tensor)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward()`` so that the backward pass averages the gradients.

        Raises RankLost, and InvalidArgument for a parameter that nothing would average.
        """
        unfrozen = (name for name, parameter in self._frozen.items() if parameter.requires_grad)
        if torch.is_grad_enabled() and (name := next(unfrozen, None)) is not None:
            raise InvalidArgument(
                f"parameter {name!r} was frozen when gt.parallelize was called, so its gradient would not be averaged "
                "over the ranks. Freeze it again; to train it later, keep requires_grad and give it to the optimizer "
                "later (add_param_group)"
            )
        self.gather_anew()
        if self.ddp is None or not torch.is_grad_enabled():
            return forward()
        if self._hook is not None:
            self._hook.register(self.ddp)
            self._hook = None
        has_begun = False

        def start() -> Any:
            nonlocal has_begun
            has_begun = True
            return forward()

        self._passes.forward_begins(averages=self.ddp.require_backward_grad_sync)
        try:
            output = self.ddp(start)
        except RuntimeError as exc:
            if has_begun:
                raise
            if "did not receive grad" in str(exc):
                raise InvalidArgument(_unused(str(exc), self._names)) from exc
            with lost_ranks_named(
                "all-reduce", self.ddp.process_group
            ):  # DDP's own collectives, of its buckets and buffers
                raise exc
        self._passes.forward_ends(output)
        return output

    def buffers(self) -> list[Tensor]:
        """Return the buffers of the whole and the sharded modules."""
        return _distinct(self._modules, nn.Module.buffers)

    def share_buffers(self) -> None:
        """Overwrite the buffers, such as the statistics of batch norm, by rank 0's. One broadcast of each; collective.

        Raises RankLost.
        """
        for buffer in self.buffers():
            self._link.broadcast_from_first(buffer)

    def gather_anew(self) -> None:
        """Mark all sharded parts as not gathered, as a forward pass or one of a micro-batch begins."""
        self._not_gathered = set(map(id, self.sharded))

    @property
    def is_gathered(self) -> bool:
        """Whether the forward pass is past all sharded parts, so that no rank gathers another."""
        return not self._not_gathered

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes inside only add up; the first one after it averages them all."""
        for module in self.sharded:
            _set_sync(module, False)
        try:
            with self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext():
                yield
        finally:
            for module in self.sharded:
                _set_sync(module, True)


def replicated(
    model: nn.Module, scopes: Mapping[str, tuple[Replicate, nn.Module]], group: MeshGroup, seed: int, split: set[int]
) -> Replicas:
    """Replicate the ``scopes`` of ``model`` over ``group``, and initialize those on the meta device. Collective.

    ``split`` are the ids of parameters in them that are not replicated.
    """
    # Looked up again: a split layer inside them was replaced.
    parts = {name: (scope, model.get_submodule(name)) for name, (scope, _) in scopes.items()}
    whole = {name: module for name, (scope, module) in parts.items() if not scope.shard}
    sharded = dict(
        called for name, (scope, module) in parts.items() if scope.shard for called in called_parts(name, module)
    )
    _materialise(whole, group.device, seed)
    for name, module in sharded.items():
        _shard(name, module, group, seed)
    return Replicas(group, whole, sharded.values(), split)


class _Holder(nn.Module):
    """Parameters and buffers of several modules, the only ones that DistributedDataParallel sees."""

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer_{number}", buffer)

    def forward(self, forward: Callable[[], Any]) -> Any:
        return forward()


def _unused(message: str, names: list[str]) -> str:
    """Return DDP's message about parameters without a gradient, with their names."""
    listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    numbers = [int(number) for number in listed[1].split()] if listed else []
    unused = ", ".join(repr(names[number]) for number in numbers if number < len(names)) or "some"
    return (
        f"the last loss did not depend on parameters {unused}, or its backward pass failed before it came to them, so "
        "their gradients were not averaged over the ranks. If it failed, end all ranks and start them again. Else "
        "freeze what is never used (requires_grad_(False)) before gt.parallelize, add 0 * parameter.sum() to the "
        "output for what is used at times"
    )


def _distinct(modules: Iterable[nn.Module], tensors: Callable[[nn.Module], Iterable[Any]]) -> list[Any]:
    return list({id(tensor): tensor for module in modules for tensor in tensors(module)}.values())


def _shard(name: str, module: nn.Module, group: MeshGroup, seed: int) -> None:
    """Shard the parameters of ``module`` over the ranks; at most one layer of it is ever whole."""
    blanks = {owner_name: copy.deepcopy(owner) for owner_name, owner in _owners({name: module})}
    if group.link.world_size == 1:
        _materialise({name: module}, group.device, seed)
        return
    if not blanks:
        for tensor in [*module.parameters(), *module.buffers()]:
            group.link.broadcast_from_first(tensor)
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=group.device_mesh)
    if dist.get_backend(group.process_group) == "gloo":
        name_lost_ranks(module)
    if not blanks:
        return
    module.to_empty(device=group.device)
    for owner_name, owner in _named({name: module}):
        if owner_name in blanks:
            _fill(owner_name, owner, blanks.pop(owner_name), group, seed)


def _set_sync(module: Any, value: bool) -> None:
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(value)


def _materialise(modules: Mapping[str, nn.Module], device: torch.device, seed: int) -> None:
    """Allocate every module on the meta device on ``device``, with the values of its ``reset_parameters``.

    They depend on ``seed`` and the module's name alone, and equal those of the layer if it were split. Shared
    parameters stay shared, with the values of the first of their names; tensors that are not on the meta device stay
    unchanged.
    """
    made: dict[int, tuple[Tensor | None, nn.Parameter]] = {}
    for name, owner in _owners(modules):
        before = {**owner._parameters, **owner._buffers}
        owner.to_empty(device=device, recurse=False)
        if not has_first_rows(owner):
            _reset(name, owner, device, seed)
        else:
            with torch.no_grad():
                for key, parameter in owner.named_parameters(recurse=False):
                    parameter.copy_(first_rows(name, owner, key, range(len(parameter)), device, seed))
        for key, tensor in before.items():
            kept = owner._parameters if key in owner._parameters else owner._buffers
            if tensor is not None and not _is_meta(tensor):
                kept[key] = tensor  # type: ignore[assignment]
            elif isinstance(tensor, nn.Parameter):
                # A reference to the original is held, so that no other tensor gets its id.
                kept[key] = made.setdefault(id(tensor), (tensor, owner._parameters[key]))[1]  # type: ignore[arg-type]


def _fill(name: str, owner: nn.Module, blank: nn.Module, group: MeshGroup, seed: int) -> None:
    """Copy the values of ``blank``, on the meta device, to this rank's part in ``owner``."""
    if has_first_rows(blank):
        with torch.no_grad():
            for key, parameter in owner.named_parameters(recurse=False):
                rows = RowShard(parameter.shape[0], group).rows
                local_part(parameter).copy_(first_rows(name, blank, key, rows, group.device, seed))
        return
    blank.to_empty(device=group.device, recurse=False)
    _reset(name, blank, group.device, seed)
    with torch.no_grad():
        for key, parameter in owner.named_parameters(recurse=False):
            whole = blank._parameters[key]
            assert whole is not None
            shard = RowShard(whole.shape[0], group)
            local_part(parameter).copy_(whole[shard.first : shard.stop])
        for key, buffer in owner.named_buffers(recurse=False):
            value = blank._buffers[key]
            assert value is not None
            buffer.copy_(value)


def _reset(name: str, owner: nn.Module, device: torch.device, seed: int) -> None:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed & (2**64 - 1)) >> 1)
        owner.reset_parameters()  # type: ignore[operator]


def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for scope, module in modules.items():
        for name, part in module.named_modules():
            yield ".".join(part_name for part_name in (scope, name) if part_name), part


def _owners(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that have parameters or buffers of their own on the meta device."""
    return [(name, part) for name, part in _named(modules) if any(_is_meta(tensor) for _, tensor in _own(part))]


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def require_first_values(scopes: Mapping[str, tuple[Replicate, nn.Module]], split: Iterable[nn.Module]) -> None:
    """Raise InvalidArgument for meta tensors that cannot be initialized; ``split`` layers can be."""
    skipped = {id(module) for module in split}
    for name, owner in _owners({name: module for name, (_, module) in scopes.items()}):
        if id(owner) in skipped:
            continue
        if not callable(getattr(owner, "reset_parameters", None)):
            raise InvalidArgument(
                f"module {name!r} ({type(owner).__name__}) is on the meta device and has no reset_parameters(), so its "
                f"{_own(owner)[0][0]!r} has no values; give it one, or make the module on a real device"
            )
        unfilled = [key for key, buffer in owner.named_buffers(recurse=False) if _is_meta(buffer)]
        if unfilled and has_first_rows(owner):
            raise InvalidArgument(
                f"buffer {unfilled[0]!r} of {name!r} ({type(owner).__name__}) is on the meta device, and nothing "
                "gives it values; make it on a real device"
            )
    for name, (scope, module) in scopes.items():
        tensors = [*dict(named_dense_parameters(module)).values(), *module.buffers()]
        if scope.shard and 0 < sum(map(_is_meta, tensors)) < len(tensors):
            raise InvalidArgument(f"scope {name!r} is on the meta device in part; make all of it there, or none")
