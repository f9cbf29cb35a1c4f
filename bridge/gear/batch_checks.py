"""The arguments of a gradient batcher, checked before anything changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import merge_duplicates
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows
from geartrain.ams.values.specs import Ids


def checked_lags(versions: Any, num_ids: int, dense_version: int) -> npt.NDArray[np.int64]:
    """Return how many dense updates each feature lags [N], not below 0. Raises InvalidRows."""
    array = np.asarray(versions)
    if array.shape != (num_ids,) or (array.dtype.kind not in "iu" and num_ids):
        raise InvalidRows(
            f"versions are {array.dtype} of shape {array.shape}; {num_ids} ids need integers ({num_ids},)"
        )
    return np.maximum(dense_version - array.astype(np.int64), 0)


def check_distinct(ids: Ids) -> None:
    """Raise InvalidIds, naming the first id that occurs twice."""
    distinct, inverse, _ = merge_duplicates(ids)
    if len(distinct) < len(ids):
        first = int(np.flatnonzero(np.bincount(inverse) > 1)[0])
        raise InvalidIds(
            f"id {distinct[first]} occurs {np.count_nonzero(inverse == first)} times; ids of an add must be distinct: "
            "sum the gradients of an id within a step first"
        )


def check_sender(source: str, sequence: int, lr: float | None) -> None:
    """Raise InvalidArgument if one of these is outside its range."""
    if not source:
        raise InvalidArgument("source is ''; it must name the fast gear, so that a retried gradient counts once")
    if sequence < 0:
        raise InvalidArgument(f"sequence is {sequence}; it must be >= 0")
    if lr is not None and not (math.isfinite(lr) and lr >= 0):
        raise InvalidArgument(f"lr is {lr!r}; it must be finite and >= 0, or None for the dense table's own")


def check_settings(
    dim: int,
    gradients_per_id: int,
    ids_per_update: int,
    reduction: str,
    flush_seconds: float | None,
    stale: str,
    max_gradient_lag: int | None,
) -> None:
    """Raise InvalidArgument if one of these is outside its range."""
    if dim < 1:
        raise InvalidArgument(f"dim is {dim}; it must be at least 1")
    if gradients_per_id < 1:
        raise InvalidArgument(f"gradients_per_id is {gradients_per_id}; it must be at least 1")
    if ids_per_update < 1:
        raise InvalidArgument(f"ids_per_update is {ids_per_update}; it must be at least 1")
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if flush_seconds is not None and not flush_seconds >= 0:
        raise InvalidArgument(f"flush_seconds is {flush_seconds!r}; it must be >= 0, or None for no bound")
    if stale not in ("apply", "scale", "drop"):
        raise InvalidArgument(f"stale is {stale!r}; it must be 'apply', 'scale' or 'drop'")
    if (stale == "drop") != (max_gradient_lag is not None):
        raise InvalidArgument(
            f"max_gradient_lag is {max_gradient_lag} with stale={stale!r}; stale='drop' needs it, the others take None"
        )
    if max_gradient_lag is not None and max_gradient_lag < 0:
        raise InvalidArgument(f"max_gradient_lag is {max_gradient_lag}; it must be >= 0")
