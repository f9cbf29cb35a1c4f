"""Cached rows of a cluster's tables, on the device of the module that looks them up, and their update by pushes.

The host knows the place of each row (``row_cache.py``). Tables of one shape share an array, so that a step updates the
rows of all of them in a few operations. Legend: C places, D width, U distinct ids of a look-up, A rows that are
inserted, N rows of a push, W numbers of a row's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.tables import array_update
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import DTYPES, Ids, TableSpec
from geartrain.bridge.kernels.optimizers import EXACT_OPTIMIZERS, ExactStep, exact_factors
from geartrain.bridge.kernels.rounding import ROW, SLOT, round_rows, rounding_key
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy
from geartrain.bridge.rows.transfers import upload_together

Array = npt.NDArray[Any]


class CachedRead(NamedTuple):
    """Reads and inserts of one table's look-up, by positions among its distinct ids."""

    out_UD: Array
    """Rows that were pulled; on the host, cached rows are written here."""
    hits: Ids
    positions: Ids
    """Positions of the hits."""
    taken: Ids
    places: Ids
    """Places of the inserted rows."""
    states_AW: Array | None
    """States of the inserted rows; None: there are none."""
    others: Ids


class CachedPush(NamedTuple):
    """Update of cached rows by one table's push."""

    spec: TableSpec
    positions: Ids
    """Positions of the push's rows in the cache, [N]."""
    ids: Ids
    """Their ids, [N]."""
    gradients_ND: npt.NDArray[np.float32]


class CachedRows:
    """Rows of all places, with their slots, on one device; the rest of their state is on the host."""

    def __init__(self, spec: TableSpec, capacity: int, *, has_states: bool) -> None:
        """``spec``: of the first table. Without ``has_states`` slots and updates are unknown."""
        self._spec = spec
        self._rows_CD = torch.zeros(capacity, spec.dim, dtype=TORCH_DTYPES[spec.dtype], device="cpu")
        self._slots_CS: Tensor | None = None
        self._updates_C = np.zeros(capacity, np.int64) if has_states and spec.step_bytes else None
        if has_states and spec.has_slots:
            self._slots_CS = torch.zeros(capacity, spec.slot_dim, dtype=TORCH_DTYPES[spec.slot_dtype], device="cpu")
        self._has_states = has_states
        self.is_there_C = np.zeros(capacity, np.bool_)
        """Whether the shard has the row; otherwise the initial values are cached."""
        self.clock_C = np.zeros(capacity, np.int64)
        """Step before which all writes are in the row, as of its pull."""

    @property
    def runs_on_host(self) -> bool:
        """Whether compiled code updates the rows; otherwise tensor operations."""
        return self._rows_CD.device.type == "cpu"

    def move_to(self, device: torch.device) -> None:
        """Move the rows to another device."""
        self._rows_CD = self._rows_CD.to(device)
        self._slots_CS = None if self._slots_CS is None else self._slots_CS.to(device)

    def can_follow(self, optimizer: RowOptimizerSpec) -> bool:
        """Return whether :meth:`update` gives the same bits as a push on a shard."""
        return self._has_states and (self.runs_on_host or optimizer.name in EXACT_OPTIMIZERS)

    def read(self, reads: Sequence[CachedRead]) -> list[Tensor | None]:
        """Return the rows found by look-ups, then insert rows that were pulled for them.

        The result has the rows [U, D] of each look-up on the device; None on the host, where they are in ``out``.
        """
        slots = [self._taken_in(read) for read in reads]
        if self.runs_on_host:
            rows_CD = as_numpy(self._rows_CD)
            for read, own in zip(reads, slots, strict=True):
                read.out_UD[read.hits] = rows_CD[read.positions]
                if read.states_AW is not None:
                    rows_CD[read.places] = read.states_AW[:, : self._spec.dim]
                if own is not None and self._slots_CS is not None:
                    as_numpy(self._slots_CS)[read.places] = own
            return [None] * len(reads)
        ends = list(accumulate(len(read.out_UD) for read in reads))
        starts = [end - len(read.out_UD) for end, read in zip(ends, reads, strict=True)]

        def among_all(name: str) -> list[Ids]:
            return [getattr(read, name) + start for read, start in zip(reads, starts, strict=True)]

        sent = [
            np.concatenate(each)
            for each in (
                among_all("taken") + among_all("others"),
                among_all("hits"),
                [read.positions for read in reads],
                [read.places for read in reads],
                [read.out_UD[read.taken] for read in reads] + [read.out_UD[read.others] for read in reads],
                [own for own in slots if own is not None],
            )
            if each
        ]
        pulled, hits, positions, places, rows_ND, *slots_AS = self._upload(sent)
        all_UD = self._rows_CD.new_empty(ends[-1], self._spec.dim)
        if len(pulled):
            all_UD[pulled] = rows_ND
        if len(hits):
            all_UD[hits] = self._rows_CD[positions]
        if len(places):
            self._rows_CD[places] = rows_ND[: len(places)]
        if slots_AS and self._slots_CS is not None:
            self._slots_CS[places] = slots_AS[0]
        return list(all_UD.split_with_sizes([len(read.out_UD) for read in reads]))

    def _taken_in(self, read: CachedRead) -> Array | None:
        """Record on the host the updates that states report, and return the slots [A, S], or None."""
        if read.states_AW is None or not self._has_states:
            return None
        spec = self._spec
        bytes_AB, first, last = read.states_AW.view(np.uint8), spec.row_bytes, spec.row_bytes + spec.slot_bytes
        updates_A = np.ascontiguousarray(bytes_AB[:, last : last + 8]).view(np.int64)[:, 0]
        self.is_there_C[read.places] = updates_A >= 0
        if self._updates_C is not None:
            self._updates_C[read.places] = np.maximum(updates_A, 0)
        if self._slots_CS is None:
            return None
        return np.ascontiguousarray(bytes_AB[:, first:last]).view(DTYPES[spec.slot_dtype])

    def _upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arrays on the device, moved in one copy."""
        types = {dtype: TORCH_DTYPES[str(dtype)] for dtype in {one.dtype for one in arrays} if dtype.itemsize == 2}
        bits = [torch.from_numpy(one.view(np.int16) if one.dtype in types else one) for one in arrays]
        sent = upload_together(bits, self._rows_CD.device)
        return [one.view(types.get(array.dtype, one.dtype)) for one, array in zip(sent, arrays, strict=True)]

    def update(self, pushes: Sequence[CachedPush], optimizer: RowOptimizerSpec, scale: float) -> list[int]:
        """Update cached rows as pushes update the shards', to the bit; return how many rows each would have refused."""
        if self.runs_on_host:
            return [
                array_update.update(
                    push.spec,
                    as_numpy(self._rows_CD),
                    None if self._slots_CS is None else as_numpy(self._slots_CS),
                    push.positions,
                    push.gradients_ND,
                    optimizer=optimizer,
                    scale=scale,
                    steps=self._updates_C,
                    ids=push.ids,
                )
                for push in pushes
            ]
        positions = np.concatenate([push.positions for push in pushes])
        arrays = {"at": positions, "gradients": np.concatenate([push.gradients_ND for push in pushes])}
        if self._updates_C is not None:
            self._updates_C[positions] += 1
            updates_N = self._updates_C[positions]
            factors_NF = exact_factors(optimizer, updates_N)
            arrays |= {} if factors_NF is None else {"factors": factors_NF}
            if self._spec.rounds:
                keys = [rounding_key(push.spec.seed, table_hash(push.spec.name)) for push in pushes]
                counts = [len(push.ids) for push in pushes]
                arrays["keys"] = np.repeat(np.array(keys, np.uint64).view(np.int64), counts)
                arrays |= {"ids": np.concatenate([push.ids for push in pushes]), "updates": updates_N}
        sent = dict(zip(arrays, self._upload(list(arrays.values())), strict=True))
        at = sent["at"]
        stored = [self._rows_CD] if self._slots_CS is None else [self._rows_CD, self._slots_CS]
        rows_ND, *slots_NS = (one[at].float() for one in stored)
        step = ExactStep(rows_ND, slots_NS[0] if slots_NS else None, sent["gradients"] * scale, sent.get("factors"))
        EXACT_OPTIMIZERS[optimizer.name](optimizer, step)
        for one, values, part in zip(stored, (rows_ND, *slots_NS), (ROW, SLOT), strict=False):
            if one.dtype != torch.float32:
                drawn_by = {"key": sent["keys"], "ids_N": sent["ids"], "numbers_N": sent["updates"]}
                values = round_rows(values, one.dtype, part=part, **drawn_by)
            one[at] = values
        return [0] * len(pushes)
