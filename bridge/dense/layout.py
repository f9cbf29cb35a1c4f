"""Named tensors as one float32 vector, cut into the rows of a table.

Legend: P values of all tensors, D width of a row, R = ceil(P / D) rows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.text import counted
from geartrain.bridge.rows.transfers import download, upload

_NAMED = 3


@dataclass(frozen=True)
class Part:
    """Range ``start`` … ``stop`` − 1 of one tensor's values."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def check(self, tensor: Tensor) -> None:
        """Raise SpecMismatch if the tensor has another shape now."""
        if tuple(tensor.shape) != self.shape:
            raise SpecMismatch(f"{self.name} has shape {list(tensor.shape)} now; it was attached as {self}")


class Layout:
    """Places of tensors' values in rows [R, D], tensor after tensor; the last row ends with zeros.

    dtypes and devices are not in it: they may differ between workers, and change.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dim: int) -> None:
        if not isinstance(dim, int) or dim < 1:
            raise InvalidArgument(f"dim is {dim!r}; rows need a width of at least 1")
        self.dim = dim
        parts, start = [], 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            parts.append(Part(name, tuple(shape), start, stop))
            start = stop
        self.parts = tuple(parts)
        self.num_values = start
        self.num_rows = -(-start // dim)

    @property
    def fingerprint(self) -> int:
        """64-bit hash of names and shapes, in order."""
        text = json.dumps([[part.name, part.shape] for part in self.parts])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def __str__(self) -> str:
        shown = [str(part) for part in self.parts]
        if len(shown) > 2 * _NAMED:
            shown = [*shown[:_NAMED], "…", *shown[-_NAMED:]]
        return (
            f"{counted(len(self.parts), 'tensor')} of {counted(self.num_values, 'value')}, layout "
            f"{self.fingerprint:016x}: {', '.join(shown)}"
        )

    def empty(self) -> Tensor:
        """Return rows [R, D] of zeros, float32, on the host."""
        return torch.zeros(self.num_rows, self.dim, dtype=torch.float32, device="cpu")

    def pack(self, tensors: Sequence[Tensor | None], rows_RD: Tensor) -> None:
        """Copy the tensors to the rows, widened to float32; None counts as zeros. One transfer from each device.

        Raises SpecMismatch if a tensor has another shape now.
        """
        self.pack_parts(list(zip(self.parts, tensors, strict=True)), rows_RD)

    @staticmethod
    @torch.no_grad()
    def pack_parts(pairs: Sequence[tuple[Part, Tensor | None]], rows_RD: Tensor) -> None:
        """Copy some of the tensors to the rows, as :meth:`pack` does."""
        flat = rows_RD.view(-1)
        behind: dict[torch.device, list[tuple[Part, Tensor]]] = {}
        for part, tensor in pairs:
            if tensor is None:
                flat[part.start : part.stop].zero_()
                continue
            part.check(tensor)
            dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
            if dense.device.type == "cpu":
                flat[part.start : part.stop].view(part.shape).copy_(dense)
            else:
                behind.setdefault(dense.device, []).append((part, dense))
        for moved in behind.values():
            host = download(torch.cat([tensor.reshape(-1).float() for _, tensor in moved]))
            sizes = [part.stop - part.start for part, _ in moved]
            for (part, _), values in zip(moved, torch.split(host, sizes), strict=True):
                flat[part.start : part.stop].copy_(values)

    def unpack(self, rows_RD: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the rows to the tensors, in their dtypes; integers are rounded. One transfer to each device."""
        self.unpack_parts(rows_RD, list(zip(self.parts, tensors, strict=True)))

    @torch.no_grad()
    def unpack_parts(self, rows_RD: Tensor, pairs: Sequence[tuple[Part, Tensor]]) -> None:
        """Copy the rows to some of the tensors, as :meth:`unpack` does."""
        flat = rows_RD.view(-1)[: self.num_values]
        on: dict[torch.device, Tensor] = {flat.device: flat}
        for part, tensor in pairs:
            if tensor.device not in on:
                on[tensor.device] = upload(flat, tensor.device)
            values = on[tensor.device][part.start : part.stop].view(part.shape)
            tensor.copy_(values if tensor.is_floating_point() else values.round())
