"""Serialization of PyTorch state to bytes, for ``files=`` of ``Cluster.snapshot``: safetensors, no pickle.

State is the ``state_dict()`` of a module, an optimizer, an LR scheduler or a GradScaler: nested dicts, Counters, lists
and tuples of tensors, arrays of numpy, numbers, strings and None. Tensors are stored once each, on the host; the rest,
and the place of each tensor, is JSON in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument

_TREE = "geartrain-state"
_TENSOR, _ARRAY, _TUPLE, _PAIRS, _FLOAT, _APART = "$tensor", "$array", "$tuple", "$pairs", "$float", "$apart"
_COUNTER = "$counter"
_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}
"""Dtypes that safetensors writes and reads."""


@dataclass(frozen=True)
class ShardedTensorRef:
    """Reference in a state to a tensor in other files, for example one whose rows are spread over ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, as "float32"."""


@dataclass(frozen=True)
class RowsOfRank:
    """Rows of this rank of a tensor [``total``, …] spread over several ranks: those from ``first`` on."""

    rows: Tensor
    first: int
    total: int


def state_to_bytes(state: Any) -> bytes:
    """Return ``state`` as the bytes of a safetensors file.

    Dtypes, shapes, tuples and integer keys are kept; tensors that share memory are stored separately, and a number of
    numpy becomes Python's. Raises InvalidArgument naming the place of a value of any other type.
    """
    tensors: dict[str, Tensor] = {}
    tree = _packed(state, "state", tensors)
    return bytes(save(tensors, {_TREE: json.dumps(tree)}))


def state_from_bytes(data: bytes) -> Any:
    """Return the state of :func:`state_to_bytes`, with its tensors on the host. Raises InvalidArgument."""
    try:
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_TREE])
        return _unpacked(tree, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise InvalidArgument(f"{len(data)} bytes are not a state that state_to_bytes wrote: {exc!r}") from exc


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            if value.layout is not torch.strided:
                raise InvalidArgument(f"{place} is a tensor of layout {value.layout}; make it dense: to_dense()")
            if value.dtype not in _DTYPES:
                raise InvalidArgument(f"{place} is of {value.dtype}, which safetensors cannot hold; convert it")
            if value.is_meta or value.is_nested:
                raise InvalidArgument(f"{place} is a {'meta' if value.is_meta else 'nested'} tensor; make a plain one")
            name = f"{len(tensors):06}"
            tensors[name] = value.detach().cpu().clone().contiguous()
            return {_TENSOR: name}
        case ShardedTensorRef():
            return {_APART: [value.name, list(value.shape), value.dtype]}
        case np.ndarray() if _is_plain(value.dtype):
            native = np.array(value, value.dtype.newbyteorder("="))
            return {_ARRAY: _packed(torch.from_numpy(native), place, tensors)[_TENSOR]}
        case np.generic() if _is_plain(value.dtype):
            return _packed(value.item(), place, tensors)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_FLOAT: repr(value)}
        case dict():
            # Optimizers number their parameters, and keys of JSON are strings.
            for key in value:
                if not isinstance(key, str | int) or isinstance(key, bool):
                    raise InvalidArgument(f"{place} has the key {key!r}; keys must be str or int")
            kind = _COUNTER if isinstance(value, Counter) else _PAIRS  # MultiStepLR has its milestones in a Counter
            return {kind: [[key, _packed(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()]}
        case tuple():
            return {_TUPLE: [_packed(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]}
        case list():
            return [_packed(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]
        case _:
            raise InvalidArgument(
                f"{place} is {type(value).__name__}; a state holds tensors, arrays, numbers, strings, None, and dicts, "
                "lists and tuples of them"
            )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has numbers of this dtype of numpy."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "$tensor":
            return tensors[content]
        case "$array":
            return tensors[content].numpy()
        case "$float":
            return float(content)
        case "$pairs":
            return {key: _unpacked(item, tensors) for key, item in content}
        case "$counter":
            return Counter({key: _unpacked(item, tensors) for key, item in content})
        case "$apart":
            name, shape, dtype = content
            if not isinstance(vars(torch).get(dtype), torch.dtype):
                raise ValueError(f"{dtype!r} is no dtype of torch")
            return ShardedTensorRef(name, tuple(shape), dtype)
        case "$tuple":
            return tuple(_unpacked(item, tensors) for item in content)
    raise ValueError(f"unknown kind {kind!r}")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's default generators: the host's, and that of ``device`` if it is a CUDA device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the state of :func:`random_state`; a CUDA state is ignored on a machine without the device."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
