"""Conversion of a batch's ids from every accepted form to flat ids with offsets of bags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from geartrain.ams.kernels.embedding import FeatureIds, PoolingName
from geartrain.ams.values.arrays import FOLD, as_array, is_plain
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import DTYPES
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.embedding.levels import Nodes, nodes_of
from geartrain.bridge.rows.transfers import downloaded

Weights = npt.NDArray[np.float32]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _is_jagged(given: Any) -> bool:
    """Return whether it is a JaggedTensor or KeyedJaggedTensor of TorchRec: ids with lengths."""
    return callable(getattr(given, "lengths", None)) and callable(getattr(given, "values", None))


@dataclass(frozen=True)
class FieldIds:
    """The ids of one field: arrays of the host (:func:`batch_ids`), or tensors on one device (:func:`tensor_ids`)."""

    values: Any
    """Ids [N] int64, C-contiguous."""
    bags: Any
    """Offsets [B + 1], or the number of ids in every bag."""
    weights: Any = None
    """Weights [N] float32, or None."""
    given_weights: Tensor | None = None
    """The tensor of weights as it was given, if it needs a gradient."""
    is_vector: bool = False
    """Whether ids were given as a vector, one a bag: without pooling the result has no dimension for a bag's ids."""

    nodes: Nodes | None = None
    """Nodes of the level that the ids belong to; None: each sample has its own ids."""

    @property
    def num_samples(self) -> int:
        """Number of samples (B)."""
        return self.num_bags if self.nodes is None else len(self.nodes.index)

    @property
    def num_bags(self) -> int:
        """Number of bags: one a sample, or a node."""
        return len(self.values) // self.bags if isinstance(self.bags, int) else len(self.bags) - 1


FieldKind = tuple[str, int, PoolingName | None, int | None]
"""Name, number of the table, pooling and padding id of a field."""


def plain_features(batch: Any, fields: Sequence[FieldKind]) -> list[FeatureIds] | None:
    """Return the features for compiled code if each field has int64 ids [B], or pooled ones [B, L], in host memory.

    None: another form, a level, or an error, all of which :func:`ids_of_batch` handles.
    """
    if not isinstance(batch, Mapping) or getattr(batch, "level_of", None):
        return None
    features, num_samples = [], None
    for name, table, pooling, padding_id in fields:
        ids = batch.get(name)
        if isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.is_cpu and ids.layout == torch.strided:
            ids = None if ids.is_nested else ids.numpy()
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or not ids.ndim:
            return None
        num_samples = len(ids) if num_samples is None else num_samples
        length = 1 if ids.ndim == 1 else ids.shape[1] if ids.ndim == 2 and pooling is not None else 0
        if len(ids) != num_samples or not length or not ids.flags.c_contiguous or not ids.flags.aligned:
            return None
        features.append(FeatureIds(table, ids.reshape(-1), length, None, pooling, padding_id))
    return features


def ids_of_batch(batch: Any, names: list[str], parse: Callable[[Any, str], FieldIds]) -> list[FieldIds]:
    """Return the ids of the fields ``names`` in a batch: a mapping, or an object with keys(), values() and lengths().

    ``parse`` converts one field: :func:`batch_ids`, for which ids on a device are copied to the host at once, or
    :func:`tensor_ids`. Raises InvalidArgument for a batch without one of the fields, InvalidIds for other ids.
    """
    if not isinstance(batch, Mapping) and _is_jagged(batch):
        batch = _by_key(batch)
    if not isinstance(batch, Mapping):
        raise InvalidArgument(
            f"the batch is {quoted(batch)}; it must be a mapping from the names of fields to their ids, or have "
            "keys(), values() and lengths() as a KeyedJaggedTensor"
        )
    missing = [name for name in names if name not in batch]
    if missing:
        raise InvalidArgument(
            f"the batch has no ids of field {missing[0]!r}; it has {', '.join(map(repr, batch)) or 'nothing'}. Give "
            "an empty bag to samples without any"
        )
    parts = {name: _parts_of(batch[name], name) for name in names}
    if parse is batch_ids:
        parts = on_host(parts)
    given = [
        _of_level(parse(part if len(part) > 1 else part[0], name), nodes_of(batch, name), name)
        for name, part in parts.items()
    ]
    for name, ids in zip(names, given, strict=True):
        if ids.num_samples != given[0].num_samples:
            raise InvalidIds(
                f"field {names[0]!r} has ids of {counted(given[0].num_samples, 'sample')} and field {name!r} of "
                f"{ids.num_samples:,}; all fields of a batch have as many. An empty bag is for samples without ids"
            )
    return given


def _of_level(ids: FieldIds, nodes: Nodes | None, name: str) -> FieldIds:
    if nodes is None:
        return ids
    if ids.num_samples != nodes.count:
        raise InvalidIds(f"field {name!r} has ids of {ids.num_samples} nodes; its level has {nodes.count}")
    return replace(ids, nodes=nodes)


def bags_as_torch(ids: Any, offsets: Any, weights: Any, *, ends: bool, name: str) -> Any:
    """Convert arguments of ``nn.EmbeddingBag`` to the form of one field; ``ends``: the last offset ends the ids.

    Offsets [B] are the starts of bags. Without them ids [B, L] may have weights [B, L], and ids [B] weights [B].
    Raises InvalidIds, and InvalidArgument for weights of another shape.
    """
    if offsets is None and weights is None:
        return ids
    if isinstance(ids, Tensor) and ids.ndim == 1 and isinstance(offsets, Tensor) and offsets.dtype in _INTEGERS:
        end = offsets.new_full((0 if ends else 1,), len(ids))
        return ids, torch.cat([offsets, end]) if offsets.ndim == 1 else offsets, weights
    if offsets is not None:
        bounds = _integers(offsets, name, "the offsets")
        return (ids, bounds if ends else np.append(bounds, len(_integers(ids, name, "the ids"))), weights)
    is_tensor = isinstance(ids, Tensor) and ids.dtype in _INTEGERS
    array: Any = ids if is_tensor else _integers(ids, name, "the ids")
    its_shape = list(getattr(weights, "shape", np.shape(weights)))
    if array.ndim not in (1, 2) or list(array.shape) != its_shape:
        raise InvalidArgument(
            f"the weights of field {name!r} have shape {its_shape} and its ids {list(array.shape)}; without offsets "
            "both are [B], or [B, L]"
        )
    length = array.shape[1] if array.ndim == 2 else 1
    flat = weights.reshape(-1) if isinstance(weights, Tensor) else np.reshape(weights, -1)
    return array.reshape(-1), np.arange(len(array) + 1) * length, flat


def batch_ids(given: Any, name: str) -> FieldIds:
    """Return the ids of one field as arrays, given in any form.

    The forms: integers [B], or [B, L]; a jagged nested tensor; (values, offsets) or (values, offsets, weights) with
    B + 1 offsets; an object with values() and lengths(). Raises InvalidIds, naming the field.
    """
    parts = _parts_of(given, name)
    if len(parts) > 1:
        return _ragged(parts[0], parts[1], parts[2], name)
    values = parts[0]
    array = _integers(values, name, "the ids")
    if array.ndim == 1:
        return FieldIds(array, 1, is_vector=True)
    if array.ndim == 2 and array.shape[1] > 0:
        return FieldIds(array.reshape(-1), array.shape[1])
    if array.ndim == 2:
        return FieldIds(array.reshape(-1), np.zeros(len(array) + 1, np.int64))
    raise InvalidIds(f"the ids of field {name!r} have shape {list(array.shape)}; they must be [B], [B, L], or jagged")


def _parts_of(given: Any, name: str) -> tuple[Any, ...]:
    """Return the ids as given, and offsets and weights of jagged ones (None: no weights)."""
    if isinstance(given, Tensor) and given.is_nested:
        if given.layout is not torch.jagged:
            raise InvalidIds(
                f"the ids of field {name!r} are a nested tensor of layout {given.layout}; make it layout=torch.jagged"
            )
        if given.lengths() is not None:  # type: ignore[attr-defined]
            raise InvalidIds(f"the ids of field {name!r} are a nested tensor with holes; make it contiguous()")
        return given.values(), given.offsets(), None  # type: ignore[attr-defined]
    if isinstance(given, Tensor):
        return (given,)
    if _is_several(given) and len(given) in (2, 3):
        return given[0], given[1], given[2] if len(given) == 3 else None
    if not isinstance(given, np.ndarray | Mapping) and _is_jagged(given):
        weights = getattr(given, "weights_or_none", lambda: None)()
        return given.values(), _offsets_of(given.lengths(), name), weights
    return (given,)


def tensor_ids(given: Any, name: str) -> FieldIds:
    """Return the ids of one field as tensors on their device.

    Other forms and errors are left to :func:`batch_ids`; values on a device are not checked, as the host would wait.
    """
    values, *jagged = _parts_of(given, name)
    offsets: Any = jagged[0] if jagged else None
    weights: Any = jagged[1] if jagged else None
    if isinstance(values, Tensor) and values.dtype in _INTEGERS:
        if not jagged and values.ndim in (1, 2) and values.shape[-1]:
            return FieldIds(values.reshape(-1), values.shape[1] if values.ndim == 2 else 1, is_vector=values.ndim == 1)
        own = weights.detach() if isinstance(weights, Tensor) else weights
        if (
            isinstance(offsets, Tensor)
            and offsets.dtype in _INTEGERS
            and values.ndim == offsets.ndim == 1 <= len(offsets)
            and (own is None or (isinstance(own, Tensor) and own.shape == values.shape and not own.is_complex()))
            and (offsets.device.type != "cpu" or _rises(offsets, len(values)))
            and (own is None or own.device.type != "cpu" or bool(own.isfinite().all()))
        ):
            return FieldIds(values, offsets, own, weights if own is not None and weights.requires_grad else None)
    host = batch_ids(given, name)
    bags = host.bags if isinstance(host.bags, int) else torch.from_numpy(host.bags)
    weights = None if host.weights is None else torch.from_numpy(host.weights)
    return FieldIds(torch.from_numpy(host.values), bags, weights, host.given_weights, host.is_vector)


def _rises(offsets: Tensor, end: int) -> bool:
    return bool((offsets[0] == 0) & (offsets[-1] == end) & (offsets.diff() >= 0).all())


def on_host(parts: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return the parts of fields in host memory, by one copy for which the host waits once.

    Weights that need a gradient stay on their device.
    """
    own = {
        id(item): item
        for part in parts.values()
        for item in part
        if isinstance(item, Tensor) and not item.is_cpu and not item.requires_grad
    }
    if not own:
        return parts
    host = dict(zip(own, downloaded(list(own.values())), strict=True))
    return {name: tuple(host.get(id(item), item) for item in part) for name, part in parts.items()}


def _is_several(given: Any) -> bool:
    """Return whether it is a tuple, or the list that a torch DataLoader makes of one."""
    is_list = isinstance(given, list) and all(isinstance(item, Tensor | np.ndarray) for item in given)
    return is_list or isinstance(given, tuple)


def _ragged(values: Any, offsets: Any, weights: Any, name: str) -> FieldIds:
    ids = _integers(values, name, "the ids")
    if ids.ndim != 1:
        raise InvalidIds(
            f"the ids of field {name!r} have shape {list(ids.shape)}; beside offsets they must be a vector [N]"
        )
    bounds = _integers(offsets, name, "the offsets").copy()  # the backward pass reads them, too
    if bounds.ndim != 1 or not len(bounds):
        raise InvalidIds(
            f"the offsets of field {name!r} have shape {list(bounds.shape)}; they must be a vector [B + 1]"
        )
    if bounds[0] != 0 or bounds[-1] != len(ids):
        raise InvalidIds(
            f"the offsets of field {name!r} go from {bounds[0]} to {bounds[-1]}; they must go from 0 to the number of "
            f"ids, {len(ids)}: B + 1 numbers, as torch's include_last_offset. (Where bags begin, B numbers, is what "
            "gt.Embedding takes as offsets=)"
        )
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if len(falls):
        row = int(falls[0])
        raise InvalidIds(
            f"the offsets of field {name!r} fall from {bounds[row]} to {bounds[row + 1]} in row {row}; they must rise"
        )
    if weights is None:
        return FieldIds(ids, bounds)
    given = weights if isinstance(weights, Tensor) and weights.requires_grad else None
    return FieldIds(ids, bounds, _weights(weights, len(ids), name), given)


def _weights(weights: Any, count: int, name: str) -> Weights:
    array = as_array(weights, InvalidArgument, f"the weights of field {name!r}")
    is_number = array.dtype.kind in "fiu" or array.dtype == DTYPES["bfloat16"]
    if array.shape != (count,) or not is_number:
        raise InvalidArgument(
            f"the weights of field {name!r} are {array.dtype} {list(array.shape)}; they must be [{count}], a "
            "number for each id"
        )
    floats = np.array(array, np.float32, order="C")  # the backward pass reads them, too
    bad = np.flatnonzero(~np.isfinite(floats))
    if len(bad):
        raise InvalidArgument(
            f"the weight at index {int(bad[0])} of field {name!r} is {floats[bad[0]]}; weights must be finite"
        )
    return floats


def _by_key(jagged: Any) -> dict[str, Any]:
    keys = list(jagged.keys())
    values, lengths = jagged.values(), jagged.lengths()
    weights = getattr(jagged, "weights_or_none", lambda: None)()
    if not keys or len(lengths) % len(keys):
        raise InvalidIds(f"the batch has {len(lengths)} lengths for {len(keys)} keys; give each key as many")
    bags = len(lengths) // len(keys)
    offsets = _offsets_of(lengths, "/".join(map(str, keys)))
    firsts = offsets[::bags].tolist() if bags else [0] * (len(keys) + 1)  # of lengths on a device the host waits here
    if firsts[-1] != len(values):
        raise InvalidIds(f"the lengths of the batch add up to {firsts[-1]}, and there are {len(values)} ids")
    parts = {}
    for number, key in enumerate(keys):
        own = offsets[number * bags : (number + 1) * bags + 1]
        begin, end = firsts[number], firsts[number + 1]
        parts[key] = (values[begin:end], own - begin, None if weights is None else weights[begin:end])
    return parts


def _offsets_of(lengths: Any, name: str) -> Any:
    """Return the offsets of bags of these lengths: a tensor for a tensor, else an array."""
    if (
        isinstance(lengths, Tensor)
        and lengths.dtype in _INTEGERS
        and (lengths.device.type != "cpu" or bool((lengths >= 0).all()))
    ):
        return nn.functional.pad(lengths.cumsum(0), (1, 0))
    counts = _integers(lengths, name, "the lengths")
    if len(counts) and counts.min() < 0:
        row = int(np.flatnonzero(counts < 0)[0])
        raise InvalidIds(f"the length of row {row} of field {name!r} is {counts[row]}; it must be >= 0")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _integers(given: Any, name: str, what: str) -> npt.NDArray[np.int64]:
    array = as_array(given, InvalidIds, f"{what} of field {name!r}")
    if is_plain(array):
        return array
    if array.dtype.kind not in "iu" and array.size:
        if array.dtype.kind == "O":
            _refuse_none(given, array, name, what)
        is_text = isinstance(array.flat[0], str | bytes)
        hint = "; hash strings with geartrain.hash_strings" if is_text else ""
        raise InvalidIds(f"{what} of field {name!r} have dtype {array.dtype}; they must be integers (int64){hint}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InvalidIds(f"{what} of field {name!r} hold {int(array.max())}; they must be below 2**63{FOLD}")
    return np.require(array, np.int64, ["C", "A"])


def _refuse_none(given: Any, array: npt.NDArray[Any], name: str, what: str) -> None:
    if given is None:
        raise InvalidIds(f"{what} of field {name!r} are None; they must be integers (int64)")
    place = next((place for place, item in np.ndenumerate(array) if item is None), None)
    if place is not None:
        where = ", ".join(map(str, place))
        raise InvalidIds(
            f"{what} of field {name!r} hold None at index {where}; they must be integers (int64). Give an empty bag to "
            "samples without any, or a padding id"
        )
