"""Two implementations of accumulation and top-k selection of gradients: compiled for CPUs, and tensor operations.

Deep gradient compression (Lin 2017, section 3): momentum correction, accumulation of unsent values, and masking of sent
ones. For each tensor, u = momentum · u + g and v = v + u; with ``nesterov``, v = v + g + momentum · u, as in
``torch.optim.SGD``. At the selected places u = v = 0. Of equal magnitudes, the lower index is selected. The two
implementations differ only in rounding, where a device computes fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels.gradients import accumulate_and_take
from geartrain.bridge.parallel.topk.grouping import GroupedTopK


class CompiledCompaction:
    """Compiled compaction: one sweep over the state by ``torch.get_num_threads()`` threads."""

    def __init__(self, numels: Sequence[int], ks: Sequence[int]) -> None:
        self._ks = list(ks)
        self._estimates = np.zeros(len(numels), np.float32)

    def compact(
        self,
        gradients: Sequence[Tensor],
        velocities: Sequence[Tensor],
        residuals: Sequence[Tensor],
        *,
        momentum: float,
        nesterov: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Update velocities and residuals in place; return the selected indices int32 [K], and v there, float32 [K].

        Indices are within each tensor, ascending, one tensor after the other. ``gradients`` are float32 or of 16 bits,
        in C order; ``velocities`` and ``residuals`` float32. Raises NonFinite, without a tensor's name; velocities and
        residuals may have been changed by then.
        """
        indices, values = accumulate_and_take(
            [_array(gradient) for gradient in gradients],
            [_array(velocity) for velocity in velocities],
            [_array(residual) for residual in residuals],
            self._ks,
            self._estimates,
            momentum=momentum,
            nesterov=nesterov,
            threads=torch.get_num_threads(),
        )
        return torch.from_numpy(indices), torch.from_numpy(values)


def _array(tensor: Tensor) -> np.ndarray:
    """Return the elements in C order, as a view if the tensor's memory has that order."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if flat.dtype == torch.bfloat16 else flat.numpy()


class TensorCompaction:
    """Compaction by tensor operations on any device, which copy the state to one buffer and back."""

    def __init__(self, numels: Sequence[int], ks: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._grouping = GroupedTopK(numels, ks, device)

    def start(
        self,
        gradients: Sequence[Tensor],
        velocities: Sequence[Tensor],
        residuals: Sequence[Tensor],
        *,
        momentum: float,
        nesterov: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same as :meth:`CompiledCompaction.compact`, without synchronizing the host.

        In place of its error there is a third result, bool [2, T] of T tensors: whether each gradient is finite, and
        whether it is with the accumulated state.
        """
        flat_gradients, flat_velocities, flat_residuals = (
            [tensor.detach().reshape(-1) for tensor in tensors] for tensors in (gradients, velocities, residuals)
        )
        momenta, gathered = torch.zeros(2, self._grouping.buffer_numel, dtype=torch.float32, device=self._device)
        momentum_views, gathered_views = self._grouping.views(momenta), self._grouping.views(gathered)
        torch._foreach_copy_(momentum_views, flat_velocities)
        torch._foreach_copy_(gathered_views, flat_residuals)
        momenta.mul_(momentum)
        torch._foreach_add_(momentum_views, flat_gradients)
        gathered.add_(momenta, alpha=momentum if nesterov else 1.0)
        if nesterov:
            torch._foreach_add_(gathered_views, flat_gradients)
        are_finite = torch.stack([finite_of(flat_gradients), finite_of(gathered_views)])
        indices, places = self._grouping.select(gathered)
        values = gathered[places]
        momenta[places] = gathered[places] = 0
        torch._foreach_copy_(flat_velocities, momentum_views)
        torch._foreach_copy_(flat_residuals, gathered_views)
        return indices.to(torch.int32), values, are_finite


def finite_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of each of T tensors are finite, bool [T] on their device."""
    filled = [number for number, tensor in enumerate(tensors) if tensor.numel()]
    if len(filled) == len(tensors):
        return torch.stack(torch._foreach_norm(list(tensors), torch.inf)) < torch.inf
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors])
