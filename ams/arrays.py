"""numpy in, numpy out; torch in, torch out, without importing torch: arrays cross over by DLPack."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from geartrain.ams.errors import InvalidIds, InvalidRows
from geartrain.ams.specs import DTYPES, Ids


def _torch_of(value: Any) -> Any:
    """Return the torch module if ``value`` is one of its tensors, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def _as_array(value: Any) -> npt.NDArray[Any]:
    torch = _torch_of(value)
    if torch is None:
        return np.asarray(value)
    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16 of its own to receive
        bits: npt.NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def ids_array(value: Any, num_rows: int | None) -> Ids:
    """Return ``value`` as int64 [N], C-contiguous, checked. Raises InvalidIds naming the offender and the range."""
    array = _as_array(value)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidIds(f"ids have dtype {array.dtype}; they must be integers (int64)")
    if array.ndim != 1:
        raise InvalidIds(f"ids have shape {array.shape}; they must be one-dimensional [N]")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InvalidIds(f"id {int(array.max())} is out of range; ids lie in [0, 2**63)")
    ids = np.ascontiguousarray(array, dtype=np.int64)
    if ids.size:
        limit = 2**63 if num_rows is None else num_rows
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            offender = low if low < 0 else high
            index = int(np.flatnonzero(ids == offender)[0])
            raise InvalidIds(f"id {offender} at index {index} is out of range; ids lie in [0, {limit})")
    return ids


def rows_array(value: Any, num_ids: int, dim: int, *, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
    """Return ``value`` as [num_ids, dim], C-contiguous. Raises InvalidRows for another shape or dtype.

    ``dtype`` is the one required; None admits every storage type.
    """
    if isinstance(value, list | tuple):  # of Python's numbers, which have no width of their own
        try:
            value = np.asarray(value, np.float32 if dtype is None else dtype)
        except (TypeError, ValueError) as exc:
            raise InvalidRows(f"rows are no rectangle of numbers [{num_ids}, {dim}]: {exc}") from exc
    array = _as_array(value)
    if array.shape != (num_ids, dim):
        raise InvalidRows(f"rows have shape {array.shape}; {num_ids} ids of dim {dim} need ({num_ids}, {dim})")
    allowed = [dtype] if dtype is not None else list(DTYPES.values())
    if array.dtype not in allowed:
        names = ", ".join(str(kind) for kind in allowed)
        raise InvalidRows(f"rows have dtype {array.dtype}; allowed: {names}. Convert them first")
    return np.ascontiguousarray(array)


def like(array: npt.NDArray[Any], model: Any) -> Any:
    """Return ``array`` in the kind of ``model``: a tensor on its device if it is a torch tensor, else as it is."""
    torch = _torch_of(model)
    if torch is None:
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16).to(model.device)
    return torch.from_dlpack(array).to(model.device)
