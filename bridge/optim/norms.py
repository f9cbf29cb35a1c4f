"""2-norms of tensors that may be divided among ranks (DTensors: FSDP2, tensor parallelism)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator


def local_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; a gradient is laid out as its parameter ``like``.

    Any other tensor is its own part.
    """
    placed: Any = tensor
    if not hasattr(placed, "to_local"):
        return tensor
    if like is not None and placed.placements != like.placements:  # type: ignore[attr-defined]
        placed = placed.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    part: Tensor = placed.to_local()
    return part


def whole_norms(*parts: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The norms (0-dim; float32, of float64 parts float64) of the wholes of ``parts``, in their order.

    Each is a tensor that says how the whole is laid out, and this rank's part of it. One all-reduce of a number for
    each part, for all parts that are laid out alike; none without DTensors. Raises RankLost.
    """
    norms: list[Tensor] = []
    alike: dict[Hashable, list[int]] = {}
    for layout, part in itertools.chain(*parts):
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(part, dtype=dtype)
        sharded = _sharded_dims(layout)
        if sharded:
            mesh = layout.device_mesh  # type: ignore[attr-defined]
            alike.setdefault((mesh, sharded, norm.dtype, norm.device), []).append(len(norms))
        norms.append(norm)
    for (mesh, sharded, _, _), places in alike.items():  # type: ignore[misc]
        squares = torch.stack([norms[place] for place in places]).square_()
        for dim in sharded:
            squares = Communicator(mesh.get_group(dim)).sum(squares)
        for place, norm in zip(places, squares.sqrt_().unbind(), strict=True):
            norms[place] = norm
    return norms


def _sharded_dims(layout: Tensor) -> tuple[int, ...]:
    """Dimensions of the mesh over which ranks hold different parts; not every such placement ``is_shard()``."""
    placements = getattr(layout, "placements", ())
    return tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
