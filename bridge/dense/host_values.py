"""Host memory of tensors' values, from which rows are sent and into which they are received.

Legend: P values of all tensors, D width of a row, R = ceil(P / D) rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from geartrain.ams.kernels._core import ScatteredRows
from geartrain.bridge.dense.layout import Layout
from geartrain.bridge.rows.tables import as_numpy


class HostValues:
    """Tensors of one layout as rows [R, D] of float32, in the tensors' own memory.

    Tensors of another dtype or device, or with values not in order, use a buffer: up to 4·P bytes, allocated with the
    first such tensor.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._own_RD: Tensor | None = None

    def now(self, tensors: Sequence[Tensor | None]) -> ScatteredRows:
        """Return rows of the tensors' values; None counts as zeros. Values are read in place, when rows are used."""
        elsewhere = [item for item in zip(self._layout.parts, tensors, strict=True) if not _lies_in_order(item[1])]
        if elsewhere:
            self._layout.pack_parts(elsewhere, self._own())
        return self._rows(tensors)

    @contextmanager
    def coming(self, tensors: Sequence[Tensor]) -> Iterator[ScatteredRows]:
        """Yield rows for values to be received in the block, after which the tensors have them, in their dtypes.

        If the block fails, tensors whose memory is used in place may have some of the values.
        """
        pairs = list(zip(self._layout.parts, tensors, strict=True))
        here = [tensor for tensor in tensors if _lies_in_order(tensor)]
        rows_RD = self._rows(tensors)
        try:
            yield rows_RD
        finally:
            # Written without autograd: a graph that needs the earlier values must fail.
            torch.autograd.graph.increment_version(here)
        if elsewhere := [pair for pair in pairs if not _lies_in_order(pair[1])]:
            self._layout.unpack_parts(self._own(), elsewhere)

    def _own(self) -> Tensor:
        if self._own_RD is None:
            self._own_RD = self._layout.empty()
        return self._own_RD

    def _rows(self, tensors: Sequence[Tensor | None]) -> ScatteredRows:
        arrays = []
        for part, tensor in zip(self._layout.parts, tensors, strict=True):
            if tensor is not None and _lies_in_order(tensor):
                part.check(tensor)
                values = tensor.detach().view(-1)
            else:
                values = self._own().view(-1)[part.start : part.stop]
            arrays.append(as_numpy(values))
        return ScatteredRows(tuple(arrays), self._layout.dim)


def _lies_in_order(tensor: Tensor | None) -> bool:
    # Subclasses may have their memory anywhere.
    return (
        tensor is not None
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )
