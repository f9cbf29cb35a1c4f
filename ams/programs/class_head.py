"""Class head as a hosted model: the shard's part of the last layer, computed beside its class rows.

For its active classes: unit rows, logits, the online log-sum-exp with its row-weighted sum, and, once the client has
joined the shards' sums, the row gradients (formulas: ``bridge/head/loss``). Margins affect only the target logits,
which the client computes from the target rows. Runs in a shard process: numpy and the compiled class pass, never torch.
Rows, sums and gradients are float32, the sums of exponentials float64.

Cost on a shard that owns C' active classes, for B samples of width D: 4·B·C'·D multiply-adds for :meth:`compute`, as
many for :meth:`gradients`; memory PARTS·B·D floats, and a chunk of rows for each thread. Legend: A active classes here,
B samples, D width, N rows of a chunk, J samples of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import ClassPass, all_finite
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.hosted import HELD_BYTES, Float32, Gradients, HostedRows, chunk_bounds
from geartrain.ams.programs.selection import PartialFC, SamplingCorrection
from geartrain.ams.programs.top_classes import top_classes
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite
from geartrain.ams.values.shard_messages import Arrays, HostedInputs
from geartrain.ams.values.specs import Ids

NAME = "class_head"
FORWARD, SQUARED_NORM, TOP = "forward", "squared_norm", "top"

CHUNK_ROWS = 1536
PARTS = 8
"""Number of partial sums, added in order, so that the result does not depend on the number of threads."""
PART_BYTES = 64 << 20
"""Most bytes of all parts together, except the first."""
SEARCHED_BYTES = 8 << 20
"""Bytes of the rows of a chunk of a search: small chunks cost more, as each search starts without a threshold."""
NO_LOGIT = -1e37
"""Logit below every real one, and finite, so that differences are not NaN."""
UNSHIFTED_LIMIT = 84.0
"""Bound on scale + log(rows) below which exp(logit), their sum and their products stay normal float32 numbers."""
_LARGEST_INVERSE = 1e12
"""1 / the least length that a row is divided by (``class_pass_kernels.cpp``)."""
_NEARLY_INFINITE = 1e37
LOG2_E = math.log2(math.e)
MAX_SUB_CENTERS = 32
"""Most centers of a class (``kMaxCenters`` of ``class_pass.hpp``)."""


class ClassHeadModel:
    """Hosted class head, a :class:`geartrain.ams.programs.hosted.HostedModel`. Holds no state.

    Inputs, by name: ``features`` float32 [B, D] (of unit length if normalised), ``labels`` int64 [B]; for a partial
    selection ``batch_labels`` int64 [J], the labels of all samples of the step if they are more, or ``active`` int64
    [A], the active classes of this shard, ascending; without it ``retired_runs`` int64 [2·R], first and last + 1 of the
    runs of retired classes. Settings: ``logit_factor`` (logit to base 2 / cosine), ``normalised`` (1: rows are
    normalised to unit length), ``sample_rate`` (absent: every class, or ``active``) with ``min_active`` and
    ``corrected`` of :class:`PartialFC`, ``want_gradient``, ``want_row_sum``, ``sub_centers`` (absent: 1): rows are [N,
    sub_centers · D], a class's logit is the largest of its centers'. An update also takes ``lse2`` float32 [B], the
    log-sum-exp to base 2, ``target_weight`` float32 [B], dloss/dcos of the target over the scale, and ``sample_weight``
    float32 [B], the factor of each sample's part (absent: 1), and the setting ``class_smoothing``, the part of label
    smoothing for each class (absent: 0).
    """

    def compute(self, rows: HostedRows, operation: str, inputs: Sequence[HostedInputs]) -> Arrays:
        """Compute ``forward`` or ``top`` of one batch, or ``squared_norm`` of the gradients of an update.

        ``forward``: ``shift`` float32 [B], ``sum`` float64 [B] of exp2(logit − shift) over the active classes here
        except the targets, ``highest`` float32 [B], the largest logit of these without a correction, ``num_active``
        int64 [1], ``weighted`` float32 [B, D] the same weighted by unit rows (if wanted), ``target_samples`` int64 [T]
        and ``target_rows`` float32 [T, D] of the samples whose class is here. If wanted, ``row_sum`` float64 [D] of the
        unit rows and ``row_weight`` float64 [1], each row weighted by the number of classes it stands for. ``top``
        takes ``features``, the runs of retired classes and the setting ``k``; see :func:`top_classes`.
        """
        if operation in (FORWARD, TOP) and len(inputs) != 1:
            raise InvalidArgument(f"{operation!r} takes the inputs of one batch; it was given {len(inputs)}")
        if operation == FORWARD:
            return _forward(rows, _Batch(rows, inputs[0]))
        if operation == TOP:
            return _top(rows, inputs[0])
        if operation == SQUARED_NORM:
            gradients = self.gradients(rows, inputs)
            squares = rows.side_by_side(
                lambda chunk: float(np.square(gradients.make(chunk), dtype=np.float64).sum()), gradients.chunks
            )
            return {"squared_norm": np.array([math.fsum(squares)])}
        raise InvalidArgument(
            f"the class head has no operation {operation!r}; it has 'forward', 'squared_norm' and 'top'"
        )

    def gradients(self, rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
        """Return the row gradients of one step: of all its micro-batches, and of all ranks."""
        batches = [_Update(rows, batch) for batch in inputs]
        active = _union([update.batch.active for update in batches], rows)

        def compute(chunk: tuple[int, int]) -> Float32:
            ids = active.range(*chunk)
            rows_ND = rows.read(ids)
            if len(batches) == 1:
                return batches[0].overwrite(rows_ND, ids)
            total_ND = np.zeros_like(rows_ND)
            for update in batches:
                gradient_ND = update.overwrite(rows_ND.copy(), ids)
                if update.batch.active.ids is not None and len(update.batch.active.ids) != active.num:
                    gradient_ND[~update.batch.active.holds(ids)] = 0
                total_ND += gradient_ND
            return total_ND

        return Gradients(
            chunks=chunk_bounds(active.num, CHUNK_ROWS) if batches else [],
            ids=lambda chunk: active.range(*chunk),
            make=compute,
            num_rows=active.num if batches else 0,
            largest=math.fsum(update.largest for update in batches),
        )


@dataclass(frozen=True)
class _Active:
    """Active classes of this shard, ascending."""

    rows: HostedRows
    num: int
    ids: Ids | None
    """[A]; None: all of the shard's, without an array."""

    def range(self, start: int, stop: int) -> Ids:
        return self.rows.owned_ids(start, stop) if self.ids is None else self.ids[start:stop]

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        if self.ids is None or not len(self.ids):
            return np.full(len(ids), self.ids is None)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        held: npt.NDArray[np.bool_] = self.ids[places] == ids
        return held


def _union(parts: list[_Active], rows: HostedRows) -> _Active:
    if len(parts) == 1:
        return parts[0]
    held = [part.ids for part in parts if part.ids is not None]
    if len(held) < len(parts):
        return _Active(rows, rows.num_owned, None)
    ids = np.unique(np.concatenate(held)) if held else np.empty(0, np.int64)
    return _Active(rows, len(ids), ids)


class _Batch:
    """Checked batch and its active classes."""

    def __init__(self, rows: HostedRows, inputs: HostedInputs) -> None:
        num_classes = rows.spec.num_rows
        if num_classes is None:
            raise InvalidArgument(f"table {rows.spec.name!r} is hashed; the rows of a class head have num_rows")
        centers = _sub_centers(inputs, rows)
        self.features_BD = _array(inputs, "features", np.float32, (None, rows.spec.dim // centers))
        if len(self.features_BD) == 0:
            raise InvalidRows("features are [0, D]; send no batch that is empty")
        self.labels_B = _ids(inputs, "labels", len(self.features_BD), num_classes)
        self.normalised = _setting(inputs, "normalised", 0.0) != 0
        factor = _setting(inputs, "logit_factor", None)
        if not 0 < factor < 1e30:
            raise InvalidArgument(f"logit_factor is {factor!r}; it must be finite and > 0")
        self.logit_factor = factor
        self.want_gradient = _setting(inputs, "want_gradient", 1.0) != 0
        self.want_row_sum = _setting(inputs, "want_row_sum", 0.0) != 0
        self.shifted = not (self.normalised and factor / LOG2_E + math.log(num_classes) < UNSHIFTED_LIMIT)
        self._correction: SamplingCorrection | None = None
        self.active = self._select(rows, inputs, num_classes)
        mine = np.flatnonzero(rows.owns(self.labels_B))
        mine = mine[np.argsort(self.labels_B[mine], kind="stable")]
        self.target_samples, self._target_ids = mine, self.labels_B[mine]
        if not self.active.holds(self._target_ids).all():
            raise InvalidIds("a label is not among the active classes; 'active' holds every label that the shard owns")
        self.weight_B = (
            _array(inputs, "sample_weight", np.float32, (len(self.labels_B),))
            if "sample_weight" in inputs.arrays
            else None
        )
        self.compiled = ClassPass(
            self.features_BD,
            logit_factor=factor,
            normalised=self.normalised,
            weights=self.weight_B,
            centers=centers,
        )

    def _select(self, rows: HostedRows, inputs: HostedInputs, num_classes: int) -> _Active:
        if "active" in inputs.arrays:
            ids = _ids(inputs, "active", None, num_classes)
            if not rows.owns(ids).all() or np.any(np.diff(ids) <= 0):
                raise InvalidIds("'active' must hold classes that this shard owns, rising")
            return _Active(rows, len(ids), ids)
        live = LiveClasses(num_classes, _retired_runs(inputs))
        live.require(self.labels_B, "label")
        if "sample_rate" not in inputs.settings:
            if live.are_all:
                return _Active(rows, rows.num_owned, None)
            owned = rows.owned_ids(0, rows.num_owned)
            owned = owned[live.holds(owned)]
            return _Active(rows, len(owned), owned)
        select = PartialFC(
            sample_rate=inputs.settings["sample_rate"],
            seed=inputs.seed,
            min_active=_whole_number(inputs, "min_active", 0.0),
        )
        labels = self.labels_B
        if "batch_labels" in inputs.arrays:
            others = live.require(_ids(inputs, "batch_labels", None, num_classes), "batch_label")
            labels = np.concatenate([labels, others])
        chosen = live.select(select, labels, inputs.step)
        if _setting(inputs, "corrected", 0.0) != 0:
            self._correction = SamplingCorrection.of(labels, chosen.num, live.num_live_classes)
        if chosen.sorted_ids is None:
            return _Active(rows, rows.num_owned, None)
        ids = chosen.sorted_ids[rows.owns(chosen.sorted_ids)]
        return _Active(rows, len(ids), ids)

    @property
    def log2_weight(self) -> float:
        """Largest offset of logits."""
        return 0.0 if self._correction is None else self._correction.log2_weight

    def offsets(self, ids: Ids) -> Float32 | None:
        """Return the offsets of the logits of classes [N], ascending; None: none."""
        if self._correction is None:
            return None
        positives = self._correction.positives
        low, high = np.searchsorted(positives, (ids[0], ids[-1] + 1))
        here = positives[low:high]
        places = np.searchsorted(ids, here)
        return self._correction.offsets_at(places[ids[places] == here], len(ids))

    def targets(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return (samples, rows of the chunk) of the targets among ``ids`` [N], ascending."""
        low, high = np.searchsorted(self._target_ids, (ids[0], ids[-1] + 1))
        wanted = self._target_ids[low:high]
        places = np.searchsorted(ids, wanted)
        here = ids[places] == wanted
        return self.target_samples[low:high][here], places[here].astype(np.int64, copy=False)


class _Sums:
    """Running sums over some chunks."""

    def __init__(self, batch: _Batch) -> None:
        size, width = batch.features_BD.shape
        self.shift_B = np.full(size, NO_LOGIT, np.float32) if batch.shifted else None
        self.sum_B = np.zeros(size, np.float64)
        self.weighted_BD = np.zeros((size, width), np.float32) if batch.want_gradient else None
        self.row_sum_D = np.zeros(width) if batch.want_row_sum else None
        self.row_weight = 0.0
        self.highest_B = np.full(size, NO_LOGIT, np.float32)


def _forward(rows: HostedRows, batch: _Batch) -> Arrays:
    active = batch.active
    chunks = chunk_bounds(active.num, CHUNK_ROWS)
    parts = max(1, min(PARTS, len(chunks), PART_BYTES // batch.features_BD.nbytes))
    target_rows_BD = np.zeros_like(batch.features_BD)

    def add_part(part: int) -> _Sums:
        sums = _Sums(batch)
        for start, stop in chunks[part::parts]:
            ids = active.range(start, stop)
            samples, places = batch.targets(ids)
            offsets = batch.offsets(ids)
            if sums.row_sum_D is not None:
                sums.row_weight += len(ids) if offsets is None else float(np.exp2(offsets, dtype=np.float64).sum())
            batch.compiled.forward(
                rows.read(ids),
                target_rows=places,
                target_samples=samples,
                target_out=target_rows_BD,
                shift=None if sums.shift_B is None else sums.shift_B[None],
                sum=sums.sum_B[None],
                weighted=None if sums.weighted_BD is None else sums.weighted_BD[None],
                kept=None,
                offsets=offsets,
                row_sum=None if sums.row_sum_D is None else sums.row_sum_D[None],
                highest=sums.highest_B[None],
            )
        return sums

    joint: dict[str, npt.NDArray[Any]] = _joined(rows.side_by_side(add_part, range(parts)))
    samples = np.sort(batch.target_samples)
    joint["num_active"] = np.array([active.num])
    return {**joint, "target_samples": samples, "target_rows": target_rows_BD[samples]}


def _joined(parts: list[_Sums]) -> dict[str, npt.NDArray[Any]]:
    shifts = [part.shift_B for part in parts if part.shift_B is not None]
    shift_B = np.max(shifts, axis=0) if shifts else np.zeros(len(parts[0].sum_B), np.float32)
    sum_B = np.zeros_like(parts[0].sum_B)
    weighted_BD = None if parts[0].weighted_BD is None else np.zeros_like(parts[0].weighted_BD)
    with np.errstate(invalid="ignore", over="ignore"):  # a loss of logits that are not finite is refused later
        for part in parts:
            shrink_B = np.float32(1) if part.shift_B is None else np.exp2(part.shift_B - shift_B)
            sum_B += part.sum_B * shrink_B
            if weighted_BD is not None and part.weighted_BD is not None:
                weighted_BD += part.weighted_BD * np.reshape(shrink_B, (-1, 1))
    joint = {"shift": shift_B, "sum": sum_B, "highest": np.max([part.highest_B for part in parts], axis=0)}
    row_sums = [part.row_sum_D for part in parts if part.row_sum_D is not None]
    if row_sums:
        joint |= {"row_sum": np.sum(row_sums, axis=0), "row_weight": np.array([sum(part.row_weight for part in parts)])}
    return joint if weighted_BD is None else {**joint, "weighted": weighted_BD}


def _top(rows: HostedRows, inputs: HostedInputs) -> Arrays:
    centers = _sub_centers(inputs, rows)
    features_BD = _array(inputs, "features", np.float32, (None, rows.spec.dim // centers))
    k = _whole_number(inputs, "k", None)
    normalised = _setting(inputs, "normalised", 0.0) != 0
    chunks = chunk_bounds(rows.num_owned, max(CHUNK_ROWS, SEARCHED_BYTES // rows.spec.row_bytes))
    parts = max(1, min(PARTS, len(chunks)))
    return top_classes(
        rows,
        features_BD,
        k,
        live=LiveClasses(rows.spec.num_rows or 0, _retired_runs(inputs)),
        normalised=normalised,
        centers=centers,
        chunks=chunks,
        parts=parts,
    )


class _Update:
    """Batch with its log-sum-exp, for an update."""

    def __init__(self, rows: HostedRows, inputs: HostedInputs) -> None:
        self.batch = _Batch(rows, inputs)
        size = len(self.batch.labels_B)
        self._lse2_B = _array(inputs, "lse2", np.float32, (size,))
        self._target_weight_B = _array(inputs, "target_weight", np.float32, (size,))
        for name in {"features", "lse2", "target_weight", "sample_weight"} & inputs.arrays.keys():
            if not all_finite(inputs.arrays[name]):
                raise NonFinite(f"{name} of the batch hold NaN or infinity; nothing was changed")
        self._weight = inputs.weight
        self._class_smoothing = _setting(inputs, "class_smoothing", 0.0)
        if not 0 <= self._class_smoothing <= 1:
            raise InvalidArgument(f"class_smoothing is {self._class_smoothing!r}; it must lie in [0, 1]")
        weight_B = self.batch.weight_B
        features_BD = self.batch.features_BD
        sum_D = features_BD.sum(0) if weight_B is None else weight_B @ features_BD
        self._common_D = np.float32(-self._class_smoothing) * sum_D if self._class_smoothing else None
        with np.errstate(over="ignore"):
            if not np.isfinite(np.float32(self._weight)):
                raise NonFinite(f"the weight of the batch is {self._weight!r}; nothing was changed")

    @property
    def largest(self) -> float:
        """Bound of the gradients for any rows: |dloss/dcos| <= exp2(largest logit − lse), |w| >= 1e-12."""
        if not self.batch.normalised:
            return math.inf
        length = float(np.linalg.norm(self.batch.features_BD.astype(np.float64), axis=1).max())
        with np.errstate(over="ignore"):
            steepest = np.exp2(
                self.batch.logit_factor * length * 1.0001 + self.batch.log2_weight - float(self._lse2_B.min())
            )
            sums = len(self._lse2_B) * steepest + float(np.abs(self._target_weight_B, dtype=np.float64).sum())
            sums += len(self._lse2_B) * self._class_smoothing * 2.0**self.batch.log2_weight
            if self.batch.weight_B is not None:
                sums *= float(np.abs(self.batch.weight_B).max())
            largest = 2 * abs(self._weight) * _LARGEST_INVERSE * length * sums
        return (
            float(largest) if max(length * sums, abs(self._weight) * _LARGEST_INVERSE) < _NEARLY_INFINITE else math.inf
        )

    def overwrite(self, rows_ND: Float32, ids: Ids) -> Float32:
        """Overwrite the rows of ``ids`` by their gradient."""
        samples, places = self.batch.targets(ids)
        self.batch.compiled.overwrite(
            rows_ND,
            target_rows=places,
            target_samples=samples,
            log_sum=self._lse2_B,
            target_weight=self._target_weight_B,
            kept=None,
            factor=self._weight,
            offsets=self.batch.offsets(ids),
            common=self._common_D,
        )
        return rows_ND


def step_bytes(active: int, batch_bytes: int, dim: int) -> tuple[int, str]:
    """Return the bytes that a step takes on a shard with ``active`` active rows, and the formula: the sums of a forward
    pass or the gradients of an update, never both; gradients beyond HELD_BYTES are made chunk by chunk.
    ``batch_bytes``: of float32 [R·B, D].
    """
    gradients = active * dim * 4
    sums = max(1, min(PARTS, len(chunk_bounds(active, CHUNK_ROWS)), PART_BYTES // batch_bytes))
    size = max((sums + 1) * batch_bytes, 2 * gradients if gradients <= HELD_BYTES else 0)
    return size, f"({sums} + 1)·R·B·D·4 or 2·A·D·4/S, if that is at most 2 · 32 MiB"


def _array(inputs: HostedInputs, name: str, dtype: type[Any], shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """Return the input of this dtype and shape (None: any length). Raises InvalidRows."""
    array = inputs.arrays.get(name)
    wanted = f"{np.dtype(dtype)} {['any' if size is None else size for size in shape]}"
    if array is None:
        raise InvalidRows(f"{name} is missing; it must be {wanted}")
    fits = array.ndim == len(shape) and all(
        size in (None, found) for size, found in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        raise InvalidRows(f"{name} is {array.dtype} {list(array.shape)}; it must be {wanted}")
    # The compiled pass needs writable arrays; those of a message are read-only.
    return np.require(array, requirements=["C", "A", "W"])


def _ids(inputs: HostedInputs, name: str, count: int | None, num_classes: int) -> Ids:
    ids = _array(inputs, name, np.int64, (count,))
    wrong = np.flatnonzero((ids < 0) | (ids >= num_classes))
    if len(wrong):
        raise InvalidIds(f"{name}[{wrong[0]}] is {int(ids[wrong[0]])}; classes lie in [0, {num_classes})")
    return ids


def _retired_runs(inputs: HostedInputs) -> Ids:
    """Return the runs [R, 2]. Raises InvalidRows for an odd number of bounds."""
    if "retired_runs" not in inputs.arrays:
        return np.empty((0, 2), np.int64)
    bounds = _array(inputs, "retired_runs", np.int64, (None,))
    if len(bounds) % 2:
        raise InvalidRows(f"retired_runs has {len(bounds)} values; it must hold pairs of first and last + 1")
    return bounds.reshape(-1, 2)


def _setting(inputs: HostedInputs, name: str, default: float | None) -> float:
    value = inputs.settings.get(name, default)
    if value is None:
        raise InvalidArgument(f"setting {name!r} is missing; the client of the class head gives it")
    return value


def _sub_centers(inputs: HostedInputs, rows: HostedRows) -> int:
    centers = _whole_number(inputs, "sub_centers", 1.0)
    if not 1 <= centers <= MAX_SUB_CENTERS or rows.spec.dim % centers:
        raise InvalidArgument(
            f"sub_centers is {centers}; it must lie in [1, {MAX_SUB_CENTERS}] and divide the dim of rows, "
            f"{rows.spec.dim}"
        )
    if centers > 1 and (_setting(inputs, "class_smoothing", 0.0) or _setting(inputs, "want_row_sum", 0.0)):
        raise InvalidArgument(f"sub_centers is {centers}; such classes have no smoothed labels")
    return centers


def _whole_number(inputs: HostedInputs, name: str, default: float | None) -> int:
    value = _setting(inputs, name, default)
    if not value.is_integer():
        raise InvalidArgument(f"{name} is {value!r}; it must be a whole number")
    return int(value)
