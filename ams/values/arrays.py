"""Conversion of ids and rows between numpy and torch by DLPack, without importing torch."""

from __future__ import annotations

import sys
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels._core import first_out_of_range
from geartrain.ams.values.errors import GeartrainError, InvalidIds, InvalidRows
from geartrain.ams.values.specs import DTYPES, Ids
from geartrain.ams.values.text import counted

_INT64 = np.dtype(np.int64)
_IN_ORDER: tuple[Literal["C"], Literal["A"]] = ("C", "A")
FOLD = "; geartrain.fold_ids makes ids of any 64-bit values, and fold=[column] of a reader does"
"""Remedy in errors about values that are not ids."""
ID_BITS = 2**63 - 1
"""Mask of the bits of a 64-bit value that its id keeps: all but the sign."""


def _torch_of(value: Any) -> Any:
    """Return the torch module if ``value`` is one of its tensors, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def as_array(value: Any, error: type[GeartrainError], what: str) -> npt.NDArray[Any]:
    """Return ``value``, of numpy, torch or anything that numpy takes, as an array. Raises ``error``."""
    torch = _torch_of(value)
    if torch is None:
        try:
            return np.asarray(value)
        except (TypeError, ValueError) as exc:
            raise error(f"{what} are no array of numbers: {exc}") from exc
    if value.layout != torch.strided or value.device.type == "meta":
        kind = "a meta tensor" if value.device.type == "meta" else f"a tensor of layout {value.layout}"
        raise error(f"{what} are {kind}; they must be a dense tensor with values")
    if value.dtype == torch.bfloat16:  # numpy has no bfloat16 of its own to receive
        bits: npt.NDArray[Any] = value.detach().contiguous().view(torch.int16).numpy(force=True)
        return bits.view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = value.numpy(force=True)
    return array


def _require_unmasked(value: Any, error: type[GeartrainError], what: str) -> None:
    """Raise ``error`` for masked arrays, and lists of them: numpy would read the numbers beneath their masks."""
    # Not np.ma, which would always import it; while another thread does, the module has no class yet.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if kind is None:
        return
    arrays = [array for array in (value if isinstance(value, list | tuple) else [value]) if isinstance(array, kind)]
    if number := sum(int(np.count_nonzero(np.ma.getmaskarray(array))) for array in arrays):
        found = counted(number, "masked value")
        raise error(f"{what} hold {found}, which stand for nothing; leave them out, or fill them (.filled(0))")


def ids_array(value: Any, num_rows: int | None) -> Ids:
    """Return ``value`` as int64 [N], C-contiguous, checked. Raises InvalidIds naming the offender and the range."""
    is_vector = type(value) is np.ndarray and value.ndim == 1 and value.dtype == _INT64
    is_ready = is_vector and (flags := value.flags).c_contiguous and flags.aligned
    ids = value if is_ready else _int64_vector(value)
    index = first_out_of_range(ids, 2**63 - 1 if num_rows is None else num_rows - 1)
    if index >= 0:
        limit = f"{2**63}){FOLD}" if num_rows is None else f"{num_rows})"
        raise InvalidIds(f"id {ids[index]} at index {index} is out of range; ids lie in [0, {limit}")
    return ids


def is_plain(array: npt.NDArray[Any]) -> bool:
    """Return whether it is int64, C-contiguous and aligned, as after ``np.require``, which takes longer to ask."""
    return array.dtype == _INT64 and (flags := array.flags).c_contiguous and flags.aligned


def _int64_vector(value: Any) -> Ids:
    _require_unmasked(value, InvalidIds, "ids")
    array = as_array(value, InvalidIds, "ids")
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidIds(f"ids have dtype {array.dtype}; they must be integers (int64)")
    if array.ndim != 1:
        raise InvalidIds(f"ids have shape {array.shape}; they must be one-dimensional [N]")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InvalidIds(f"id {int(array.max())} is out of range; ids lie in [0, 2**63){FOLD}")
    return np.require(array, np.int64, _IN_ORDER)


def rows_array(value: Any, num_ids: int, dim: int, *, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
    """Return ``value`` as [num_ids, dim], C-contiguous. Raises InvalidRows for another shape or dtype.

    ``dtype`` is the one required; None admits every storage type.
    """
    if type(value) is np.ndarray and value.dtype == (dtype or np.float32) and value.shape == (num_ids, dim):
        array: npt.NDArray[Any] = value
        if array.flags.c_contiguous and array.flags.aligned:
            return array
    _require_unmasked(value, InvalidRows, "rows")
    if isinstance(value, list | tuple):  # of Python's numbers, which have no width of their own
        try:
            value = np.asarray(value, np.float32 if dtype is None else dtype)
        except (TypeError, ValueError) as exc:
            raise InvalidRows(f"rows are no rectangle of numbers [{num_ids}, {dim}]: {exc}") from exc
    array = as_array(value, InvalidRows, "rows")
    if array.shape != (num_ids, dim):
        raise InvalidRows(f"rows have shape {array.shape}; {num_ids} ids of dim {dim} need ({num_ids}, {dim})")
    allowed = [dtype] if dtype is not None else list(DTYPES.values())
    if array.dtype not in allowed:
        names = ", ".join(str(kind) for kind in allowed)
        raise InvalidRows(f"rows have dtype {array.dtype}; allowed: {names}. Convert them first")
    return np.require(array, requirements=_IN_ORDER)


def like(array: npt.NDArray[Any], model: Any) -> Any:
    """Return ``array`` in the type of ``model``: a tensor on its device if it is a torch tensor, else unchanged."""
    torch = _torch_of(model)
    if torch is None:
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16).to(model.device)
    return torch.from_dlpack(array).to(model.device)


def fold_ids(values: Any) -> Any:
    """Return an id for each integer: its 64 bits without the sign bit, int64 >= 0 of the same shape.

    That is ``value & (2**63 - 1)`` in two's complement: an id stays itself, -1 is 2^63 - 1, and folding twice equals
    folding once. v and v + 2^63 have one id; the chance that any two of n different hashes collide is below n² / 2^64.
    A negative number that marks a missing id becomes an id, too: leave it out before.

    A tensor gives a tensor on its device; a list or a numpy array gives an array. Raises InvalidIds for other values.
    """
    if _torch_of(values) is not None:
        if values.is_floating_point() or values.is_complex():
            raise InvalidIds(f"values are {values.dtype}; they must be integers of up to 64 bits")
        return values.long() & ID_BITS
    array = np.array(values, object) if isinstance(values, list | tuple) else as_array(values, InvalidIds, "values")
    if array.dtype == object:  # numpy has no type for both -1 and 2**63
        wrong = [one for one in array.flat if not isinstance(one, int | np.integer) or not -(2**63) <= one < 2**64]
        if wrong:
            raise InvalidIds(f"values hold {wrong[0]!r}; they must be integers of up to 64 bits")
        array = (array & ID_BITS).astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InvalidIds(f"values have dtype {array.dtype}; they must be integers of up to 64 bits")
    return array.astype(np.int64) & ID_BITS
