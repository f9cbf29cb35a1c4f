"""Base of split layers: each rank has some rows of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidRows, SpecMismatch
from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.shard import RowShard, local_part


class SplitLayer(nn.Module):
    """A layer of ``num`` rows over the ranks of ``group``: a parameter [num, …] is a DTensor, ``Shard(0)``.

    Optimizers, ``torch.distributed.checkpoint`` and norms so see the whole parameter, and this rank's rows are ordinary
    memory. A single rank has ordinary parameters. A ``state_dict`` loads DTensors, and plain tensors [num, …] of a
    layer that is not split.
    """

    def __init__(
        self, name: str, whole: nn.Module, rows: Mapping[str, Tensor | None], group: MeshGroup, agreement: StepAgreement
    ) -> None:
        """``rows`` [num_local, …] are this rank's part of each parameter of ``whole``."""
        super().__init__()
        self.layer_name = name
        self.shard = RowShard(next(whole.parameters()).shape[0], group)
        self.agreement = agreement
        agreement.layers.append(name)
        for of, local in rows.items():
            like = whole._parameters[of]
            own = None if like is None or local is None else self.shard.as_dtensor(local)
            parameter = None if own is None or like is None else nn.Parameter(own, requires_grad=like.requires_grad)
            self.register_parameter(of, parameter)

    def local(self, name: str) -> Tensor | None:
        """Return this rank's rows [num_local, …] of the parameter ``name``, in the autograd graph."""
        parameter = self._parameters[name]
        return None if parameter is None else local_part(parameter)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        own: Mapping[str, Tensor | None] = self._parameters
        for name, parameter in own.items():
            given = state_dict.get(prefix + name)
            if parameter is None or not isinstance(given, Tensor) or self.shard.group.link.world_size == 1:
                continue
            if tuple(given.shape) != tuple(parameter.shape):
                raise SpecMismatch(
                    f"{prefix + name} of the state has shape {tuple(given.shape)}, this layer {tuple(parameter.shape)}"
                )
            if not hasattr(given, "to_local"):
                rows = given[self.shard.first : self.shard.stop]
                state_dict[prefix + name] = self.shard.as_dtensor(rows.to(local_part(parameter).device).contiguous())
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def check_floating(samples: Any, width: int, layer: str) -> None:
    """Raise InvalidRows unless ``samples`` are features [S, ``width``]."""
    if hasattr(samples, "whole"):
        raise InvalidRows(
            f"split layer {layer!r} was given the logits of another split layer; make them whole before: logits.whole()"
        )
    if not isinstance(samples, Tensor) or samples.ndim != 2 or samples.shape[1] != width:
        given = tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__
        raise InvalidRows(
            f"split layer {layer!r} was given {given}; it takes features [S, {width}]. Flatten other dimensions first "
            "(features.flatten(0, -2))"
        )
    if not samples.dtype.is_floating_point:
        raise InvalidRows(f"split layer {layer!r} was given {samples.dtype}; it takes floating numbers")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast on ``device``; None if it is off, and on the meta device."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
