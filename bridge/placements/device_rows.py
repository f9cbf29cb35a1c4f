"""Rows and slots in the memory of the ranks' devices: each rank has consecutive ids, or ids by a hash.

Legend: C rows in all, L of them on this rank, D width, S numbers of a row's slots, N rows of a call. Rows are numbered
from the rank's first id, or in the order in which their ids came (``row_ids.py``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels.ops import require_distinct, sample_ids
from geartrain.ams.tables import array_update as array_update
from geartrain.ams.tables.compiled_store import distribution_of, table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.arrays import ids_array, rows_array
from geartrain.ams.values.errors import NonFinite, OutOfMemory
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.shard_messages import Done, SyncGroup
from geartrain.ams.values.specs import SCALED, Ids, TableSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.kernels import row_update
from geartrain.bridge.kernels.hashing import NO_ID, NUMBER_BITS, number_ids
from geartrain.bridge.kernels.initial_values import FirstValues, write_initial_values, write_new_rows
from geartrain.bridge.kernels.launch import is_capturing, runs_kernels
from geartrain.bridge.kernels.rounding import ROW, SLOT, round_rows, rounding_key
from geartrain.bridge.kernels.row_update import RowIndex as RowIndex
from geartrain.bridge.kernels.scaled import LARGEST, narrowed, num_scales
from geartrain.bridge.placements.device_number import DeviceNumber
from geartrain.bridge.placements.elapsed_momentum import RESTING, ElapsedSteps
from geartrain.bridge.placements.row_ids import HashedIds, IdRange
from geartrain.bridge.placements.row_ids import row_range as row_range
from geartrain.bridge.placements.workspace import BufferPool, Workspace
from geartrain.bridge.rows.row_identity import OTHERS, other_rows, row_digests
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

BLOCK_BYTES = 8 << 20
_HUGE_PAGE = 2 << 20
_ROUNDING_WIDTHS = 7
"""Most float32 chunks that rounding uses on a device, random bits included."""
_ELAPSED_WIDTHS = 8
"""Float32 chunks that catching up rows and slots uses on a device: four of float64."""


_PER_ROW_ARRAYS = ("rows_LD", "slots_LS", "steps_L", "row_scales_LK", "slot_scales_LK")


class DeviceRows:
    """Rows of ids ``first`` … ``stop`` − 1, with their slots, on ``device``; without ``num_rows``: of any ids.

    A table without ``num_rows`` has the ids that came and that a hash maps to this rank. It has room for L rows; free
    ones have zero slots and steps. Its room doubles when new ids may not fit; rows keep their numbers. Its index takes
    15 bytes a row more (64 on a host).

    Memory: L · D · (bytes of a row's value + bytes of its slots'), and 8 · L with Adam, with 16 bits, and where
    untouched rows move: such rows are stored as of their last step. Initial values equal those of an AMS table of the
    same spec, for any number of ranks.
    """

    incarnation = 0
    """Always 0: the table is never created anew."""

    def __init__(self, spec: TableSpec, link: Communicator, device: torch.device) -> None:
        self.spec = spec
        self.link = link
        self.row_dtype = TORCH_DTYPES[spec.dtype]
        """Type in which rows are read and written: the storage type, or with 8 bits the one that holds their values."""
        self.ids = (
            HashedIds(link.world_size, link.rank, device)
            if spec.num_rows is None
            else IdRange(spec.num_rows, link.world_size, link.rank)
        )
        """Map of ids to row numbers of this rank."""
        with torch.inference_mode(False):
            self.rows_LD = _empty(self.num_local, spec.dim, _STORED.get(spec.dtype, self.row_dtype), device)
            slot_dtype = _STORED.get(spec.slot_dtype, TORCH_DTYPES[spec.slot_dtype])
            self.slots_LS = _empty(self.num_local, spec.slot_dim, slot_dtype, device) if spec.has_slots else None
            self.row_scales_LK, self.slot_scales_LK = (
                None
                if stored is None or stored.dtype not in LARGEST
                else _empty(self.num_local, num_scales(stored.dtype, stored.shape[1]), torch.bfloat16, device)
                for stored in (self.rows_LD, self.slots_LS)
            )
            """Scales of 8-bit rows (``kernels/scaled.py``)."""
            self.clock = torch.zeros((), dtype=torch.int64, device=device) if spec.is_scaled else None
            """Steps since the rows were created; seeds the stochastic rounding to 8 bits."""
            self.steps_L = torch.zeros(self.num_local, dtype=torch.int64, device=device) if spec.step_bytes else None
            """Number of updates of each row, for Adam and for the rounding to 16 bits; the last step of each row where
            untouched rows move."""
        self.steps = ElapsedSteps(spec, self.share, device) if spec.counts_steps else None
        """Steps in which untouched rows move; None: they do not move."""
        self.refused = torch.zeros((), dtype=torch.int64, device=device)
        """Number of row updates refused since the last read, as they would leave the range of their dtype."""
        self.pool = BufferPool()
        """Pool of scratch memory on the rows' device."""
        self.lr, self.step = DeviceNumber(torch.float32), DeviceNumber(torch.int64)
        """Learning rate and step of an update, for kernels."""
        self.is_written = False
        """Whether rows were changed since they got their initial values or were restored."""
        self._key = rounding_key(spec.seed, table_hash(spec.name))
        self._counting = threading.Lock()
        self.write_initial_values()

    @staticmethod
    def chunk_copies(spec: TableSpec, device: torch.device, *, picked: bool) -> float:
        """Return the float32 chunks that a thread holds in a step, and half a chunk for the allocator's cache.

        Compiled code of a CPU, or one kernel, updates rows in place and needs only the rows, which become their
        gradient. Otherwise the step needs more: rows and slots, and buffers to round to 16 bits and to catch rows up.
        """
        narrow, moves = spec.dtype != "float32", spec.counts_steps
        in_place = not moves and row_update.is_one_kernel(spec.optimizer, spec.dim, device)
        if device.type == "cpu" or in_place:
            return 1.5 + (picked and narrow and not moves)
        narrow_slots = spec.has_slots and spec.slot_dtype != "float32"
        in_step = 2 + spec.has_slots + 0.5 * (narrow + narrow_slots)
        picked_from = picked * (1.5 * narrow + 0.5 * narrow_slots)
        rounding = _ROUNDING_WIDTHS * (narrow or narrow_slots)
        return 0.5 + in_step + picked_from + rounding + _ELAPSED_WIDTHS * moves

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows_LD.device

    @property
    def first(self) -> int:
        """First id of this rank; 0 where ids have no bound."""
        return self.ids.first

    @property
    def stop(self) -> int:
        """Id after the last one of this rank."""
        return self.ids.stop

    @property
    def share(self) -> int:
        """Rows of each rank, fewer on the last; 1 where ids have no bound."""
        return self.ids.share

    @property
    def num_local(self) -> int:
        """Number of rows on this rank (L)."""
        return self.ids.capacity

    @property
    def stored(self) -> row_update.RowArrays:
        """The rows' arrays as kernels take them."""
        return row_update.RowArrays(
            rows_LD=self.rows_LD,
            slots_LS=self.slots_LS,
            updates_L=self.steps_L,
            refused=self.refused,
            first=self.first,
            ids_L=self.ids.ids_L,
            key=self._key,
            row_scales_LK=self.row_scales_LK,
            slot_scales_LK=self.slot_scales_LK,
            clock=self.clock,
        )

    def move_to(self, device: torch.device) -> None:
        """Move the rows to another device."""
        self.ids.move_to(device)
        self.refused = self.refused.to(device)
        self.pool = BufferPool()
        for name in (*_PER_ROW_ARRAYS, "clock"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.to(device))
        if self.steps is not None:
            self.steps.move_to(device)

    def reserve(self, num_ids: int) -> None:
        """Make room for ``num_ids`` new rows, where ids have no bound. Raises OutOfMemory; nothing changes then."""
        table = self.ids.table
        if table is None or (wanted := table.needed(num_ids)) == table.capacity:
            return
        grown: dict[str, Tensor] = {}
        try:
            with torch.inference_mode(False), torch.no_grad():
                for name in _PER_ROW_ARRAYS:
                    if (held := getattr(self, name)) is not None:
                        shape = held.shape[1:]
                        new = _empty(wanted, math.prod(shape), held.dtype, held.device).view(wanted, *shape)
                        new[: len(held)] = held
                        new[len(held) :] = 0
                        grown[name] = new
                table.grow(wanted)
        except (MemoryError, RuntimeError) as exc:  # torch raises the latter
            row_bytes = self.spec.row_bytes + self.spec.slot_bytes + self.spec.step_bytes
            raise OutOfMemory(
                f"table {self.spec.name!r} has room for {table.capacity:,} rows on rank {self.link.rank} and would "
                f"grow to {wanted:,}, {wanted * row_bytes / 2**30:,.1f} GiB beside those that are there: {exc}. "
                "Nothing has changed; spread the table over more ranks, keep rows and slots in 16 bits, or hash ids "
                "into a range (num_rows=)"
            ) from exc
        for name, tensor in grown.items():
            setattr(self, name, tensor)

    def _first_values(self, ids: Ids) -> Tensor:
        """Return initial values [N, D] of rows, computed on the host as a shard does."""
        read_as: Any = SCALED.get(self.spec.dtype, self.spec.dtype)
        table = RowTable(replace(self.spec, dtype=read_as, slot_dtype="float32"), np.arange(4096, dtype=np.int64))
        out = np.empty((len(ids), self.spec.dim), self.spec.numpy_dtype)
        table.pull(ids, out)
        return as_tensor(out, self.row_dtype)

    @property
    def first_values(self) -> FirstValues:
        """Parameters of the initial values of the rows."""
        return FirstValues(*distribution_of(self.spec.initializer)[:3], self.spec.seed, table_hash(self.spec.name))

    def number(self, ids_N: Tensor, *, makes: bool) -> Tensor:
        """Return row numbers [N] of ids without a bound (NO_ID: -1), as :func:`number_rows` does; without kernels.

        There must be room for them.
        """
        table = self.ids.table
        assert table is not None
        numbers_N = table.find(ids_N)
        is_new_N = (numbers_N < 0) & (ids_N != NO_ID)
        if not bool(is_new_N.any()):
            return numbers_N
        # Computed before the ids get rows: the allocation may fail.
        first_ND = self._first_values(ids_N[is_new_N].cpu().numpy())
        if makes:
            numbers_N = table.find_or_insert(ids_N)
        else:
            numbers_N = torch.where(is_new_N, int(table.num_ids) - 1 + is_new_N.cumsum(0), numbers_N)
        self._write_rows(numbers_N[is_new_N], first_ND)
        return numbers_N

    def write_initial_values(self) -> None:
        """Reset all rows to their initial values, slots and steps to zero; ids without a bound are removed."""
        self.is_written = False
        with torch.inference_mode(False):
            self.ids.clear()
            for name in _PER_ROW_ARRAYS if self.ids.table is not None else ():
                if (held := getattr(self, name)) is not None:
                    setattr(self, name, held[: self.num_local].clone())
        for tensor in (self.slots_LS, self.slot_scales_LK, self.steps_L, self.clock):
            if tensor is not None:
                tensor.zero_()
        if self.steps is not None:
            self.steps.reset()
        if self.ids.table is not None:
            return
        if self.device.type != "cpu" and self.row_scales_LK is None:
            write_initial_values(self.rows_LD, self.first, self.first_values)
            return
        block = max(1, BLOCK_BYTES // self.spec.row_bytes)
        for start in range(0, self.num_local, block):
            stop = min(start + block, self.num_local)
            ids = np.arange(self.first + start, self.first + stop, dtype=np.int64)
            self._write_rows(slice(start, stop), self._first_values(ids))

    @property
    def num_present(self) -> int:
        """Number of rows of this rank that exist; of ids without a bound: trained, assigned or restored ones.

        The host waits for the device."""
        return self.ids.num_rows

    def present_ids(self) -> Ids:
        """Return the ids of the :attr:`num_present` rows, in their order, on the host."""
        return as_numpy(self.stored.ids(torch.arange(self.num_present, device=self.device)).cpu())

    def _places(self, ids: Ids) -> Ids:
        """Return the places of this rank's ids among the ids [N]."""
        return torch.nonzero(self.ids.are_here(torch.from_numpy(ids)))[:, 0].numpy()

    def local(self, ids: Ids) -> tuple[Ids, Tensor]:
        """Return the places among the ids [N] of this rank's ids, and their row numbers on the device.

        Where ids have no bound, rows are created. Raises OutOfMemory.
        """
        places = self._places(ids)
        ids_N = torch.from_numpy(ids[places]).to(self.device)
        if self.ids.table is None:
            return places, ids_N - self.first
        zeros_N, pieces = torch.zeros_like(ids_N), [(0, len(ids_N))]
        return places, number_rows([self], ids_N, zeros_N, zeros_N, NUMBER_BITS, pieces, makes=True)

    def _rows_of(self, ids: Ids) -> Tensor:
        """Return rows [N, D] of this rank's ids, on the device, as :meth:`current_rows`; creates none."""
        given = torch.from_numpy(ids).to(self.device)
        if self.ids.table is None:
            return self.current_rows(given - self.first)
        numbers, rows = self.ids.table.find(given), self._first_values(ids).to(self.device)
        is_known = numbers >= 0
        rows[is_known] = self.current_rows(numbers[is_known])
        return rows

    def identity(self) -> dict[str, Any]:
        """Return some ids of this rank and hashes of their rows, as JSON values, for :meth:`require_same`."""
        num = self.num_present
        numbers = sample_ids(num, min(OTHERS, num), 0, 0) if num else np.empty(0, np.int64)
        ids = as_numpy(self.stored.ids(torch.from_numpy(numbers).to(self.device)).cpu())
        return {"incarnation": 0, "ids": ids.tolist(), "row_digests": self._digests(ids)}

    def require_same(self, identity: Mapping[str, Any] | None) -> None:
        """Raise SpecMismatch if a row of ``identity`` on this rank has changed. None: nothing is compared."""
        known = identity or {}
        given = dict(zip(known.get("ids", ()), known.get("row_digests", ()), strict=False))
        ids = np.array(list(given), np.int64)
        ids = ids[self.ids.are_here(torch.from_numpy(ids)).numpy()]
        if self._digests(ids) != [given[row] for row in ids.tolist()]:
            raise other_rows(self.spec.name)

    def _digests(self, ids: Ids) -> list[str]:
        """Return hashes of the rows of this rank's ids."""
        return row_digests(as_numpy(self._rows_of(ids).cpu()))

    def pull(self, ids: Any) -> Tensor:
        """Return rows [N, D] of ``ids`` [N] (equal on every rank) on the host. Every rank calls it; one all-reduce.

        Raises InvalidIds.
        """
        given = ids_array(ids, self.spec.num_rows)
        out = np.empty((len(given), self.spec.dim), self.spec.numpy_dtype)
        self.pull_into(given, out)
        return as_tensor(out, self.row_dtype)

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """Write the rows of ids [N], the same on every rank, to ``out`` [N, D]: one all-reduce of N · D values.

        Every rank calls it; with one rank nothing travels.
        """
        del required_sync
        places = self._places(ids)
        found = torch.zeros(len(ids), self.spec.dim, dtype=self.row_dtype, device=self.device)
        found[torch.from_numpy(places).to(self.device)] = self._rows_of(ids[places])
        # As bytes: each row is on one rank and zero on the others, and gloo cannot add every 16-bit type.
        rows = self.link.sum(found.view(torch.uint8)).view(found.dtype).cpu()
        out[:] = as_numpy(rows)

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """Run :meth:`pull_into` at once, as collectives have one order; the future is done."""
        done: Future[None] = Future()
        self.pull_into(ids, out, required_sync=required_sync)
        done.set_result(None)
        return done

    def assign(self, ids: Any, rows: Any) -> Done:
        """Overwrite the rows [N, D] of this rank's ids, which are distinct; their slots become zero.

        Raises InvalidIds, InvalidArgument, InvalidRows, NonFinite, OutOfMemory; nothing has changed then.
        """
        ids = ids_array(ids, self.spec.num_rows)
        require_distinct(ids)
        values = as_tensor(rows_array(rows, len(ids), self.spec.dim, dtype=self.spec.numpy_dtype), self.row_dtype)
        if not bool(torch.isfinite(values).all()):
            raise NonFinite(f"rows for table {self.spec.name!r} hold NaN or infinity; nothing was changed")
        places, numbers = self.local(ids)
        self.is_written = True
        self._write_rows(numbers, values[torch.from_numpy(places)])
        if self.slots_LS is not None:
            self.slots_LS[numbers] = 0
        if self.steps_L is not None and self.steps is not None:
            self.steps_L[numbers] = self.steps.now if self.steps.moves_rows_at_rest else RESTING
        elif self.steps_L is not None and self.spec.optimizer.counts_updates:
            self.steps_L[numbers] = 0  # other optimizers only round by the count, which must not repeat its draws
        return Done()

    def restore(self, numbers: Tensor, rows_ND: Tensor, slots_ND: Tensor | None, steps_N: Tensor | None) -> None:
        """Overwrite rows, slots and steps (None: 0 updates, as in older snapshots of 16 bits)."""
        self._write_rows(numbers, rows_ND)
        if self.slots_LS is not None and slots_ND is not None:
            _write(self.slots_LS, self.slot_scales_LK, numbers, slots_ND.to(self.device))
        if self.steps_L is not None:
            self.steps_L[numbers] = 0 if steps_N is None else steps_N.to(self.device)

    def _write_rows(self, index: RowIndex, rows_ND: Tensor) -> None:
        _write(self.rows_LD, self.row_scales_LK, index, rows_ND.to(self.device))

    def reads_in_place(self, dtype: torch.dtype) -> bool:
        """Return whether ``rows_LD`` holds the current rows, in ``dtype``."""
        return self.steps is None and self.rows_LD.dtype == dtype

    def current_rows(self, index: RowIndex) -> Tensor:
        """Return a copy of the current rows [N, D] in their storage type, as a shard's pull does."""
        if self.steps is None or self.slots_LS is None or self.steps_L is None:
            return self.stored.rows(index, self.row_dtype)
        numbers_N = self._numbers(index)
        out_ND = self.rows_LD.new_empty(len(numbers_N), self.spec.dim)
        block = max(1, BLOCK_BYTES // (8 * self.spec.dim))
        for start in range(0, len(numbers_N), block):
            numbers_B = numbers_N[start : start + block]
            moved_BD = self.steps.moved_rows(self.rows_LD[numbers_B], self.slots_LS[numbers_B], self.steps_L[numbers_B])
            out_ND[start : start + block] = moved_BD.float()
        return out_ND

    def _numbers(self, index: RowIndex) -> Tensor:
        return torch.arange(*index.indices(self.num_local), device=self.device) if isinstance(index, slice) else index

    def load(self, work: Workspace, index: RowIndex, *, name: str) -> Tensor:
        """Return a copy of the current rows [N, D] in the compute dtype, in scratch memory called ``name``."""
        if self.row_scales_LK is not None:
            rows_ND = self.current_rows(index)
            return work.empty(name, *rows_ND.shape).copy_(rows_ND)
        if self.steps is None:
            return self._loaded(work, self.rows_LD, index, name)
        if self.device.type != "cpu" or work.arithmetic.compute != torch.float32:
            rows_ND = self.current_rows(index)
            return work.empty(name, *rows_ND.shape).copy_(rows_ND)
        rows_LD, slots_LS, steps_L, numbers, _ = self._arrays_of(index)
        assert slots_LS is not None and steps_L is not None
        num = len(rows_LD) if numbers is None else len(numbers)
        out_ND = work.empty(name, num, self.spec.dim)
        array_update.read(rows_LD, slots_LS, steps_L, numbers, out_ND.numpy(), catch_up=self.steps.catch_up)
        return out_ND

    def _loaded(self, work: Workspace, stored_LD: Tensor, index: RowIndex, name: str) -> Tensor:
        if isinstance(index, slice):
            stored_ND = stored_LD[index]
            return work.empty(name, *stored_ND.shape).copy_(stored_ND)
        shape = (len(index), stored_LD.shape[1])
        if stored_LD.dtype == work.arithmetic.compute:
            out_ND = work.empty(name, *shape)
            if not _is_compiled(stored_LD):
                return torch.index_select(stored_LD, 0, index, out=out_ND)
            array_update.gather(stored_LD.numpy(), index.numpy(), out_ND.numpy())
            return out_ND
        narrow_ND = work.empty(f"stored {name}", *shape, dtype=stored_LD.dtype)
        return work.empty(name, *shape).copy_(torch.index_select(stored_LD, 0, index, out=narrow_ND))

    def update(self, index: RowIndex, gradient_ND: Tensor, optimizer: RowOptimizerSpec, scale: Tensor) -> None:
        """Apply a step of ``optimizer`` (the table's, or with other numbers) with ``scale`` (0-dim) times the gradient.

        The gradient is overwritten. The formulas are those of ``ams/values/optimizers``, in the compute dtype; 16 bits
        are rounded stochastically, as on a shard. A row that would leave the range of its storage type is unchanged,
        with its slot, and is counted in ``refused``.
        """
        if self.device.type == "cpu" and gradient_ND.dtype == torch.float32 and not self.spec.is_scaled:
            self._update_compiled(index, gradient_ND, optimizer, float(scale))
            return
        if self.steps is None:
            lr = self.lr_of(optimizer) if gradient_ND.dtype == torch.float32 else optimizer.lr
            row_update.update(self.stored, index, gradient_ND, optimizer, lr=lr, scale=scale)
            return
        assert self.slots_LS is not None and self.steps_L is not None
        numbers_N = self._numbers(index)
        rows_ND, slots_ND = (stored[numbers_N].to(gradient_ND.dtype) for stored in (self.rows_LD, self.slots_LS))
        last_N = self.steps_L[numbers_N]
        self.steps.update(rows_ND, slots_ND, last_N, gradient_ND.mul_(scale), optimizer.lr)
        row_update.store(self.stored, numbers_N, rows_ND, slots_ND, torch.full_like(last_N, self.steps.now + 1))

    def lr_of(self, optimizer: RowOptimizerSpec) -> float | Tensor:
        """Return the learning rate as ``row_update.update`` takes it: on the device where its kernel runs."""
        if row_update.is_one_kernel(optimizer, self.spec.dim, self.device) or is_capturing(self.device):
            return self.lr.on(optimizer.lr, self.device)
        return optimizer.lr

    def end_step(self, lr: float) -> None:
        """End the step of all updates since the last call; untouched rows move by ``lr``, if the optimizer moves them.

        Every rank calls it, with the same ``lr``. It sweeps a few rows, to catch up those untouched for long.
        """
        if self.clock is not None:
            self.clock.add_(1)
        if self.steps is None:
            return
        index = self.steps.sweep()
        self._bring_up(self.steps, slice(index.start, min(index.stop, self.num_local)))
        self.steps.end_step(lr)

    def _bring_up(self, steps: ElapsedSteps, index: slice) -> None:
        """Catch up rows whose last step is long ago."""
        assert self.slots_LS is not None and self.steps_L is not None
        last_N = self.steps_L[index]
        overdue_N = steps.are_overdue(last_N)
        if self.device.type == "cpu" and not bool(overdue_N.any()):  # on a device the host would wait
            return
        old_ND, old_slots_ND = self.rows_LD[index], self.slots_LS[index]
        rows_ND, slots_ND = steps.moved(old_ND, old_slots_ND, last_N)
        ids_N, now_N = self.stored.ids(self._numbers(index)), torch.full_like(last_N, steps.now)
        rows_ND = round_rows(rows_ND, old_ND.dtype, key=self._key, ids_N=ids_N, numbers_N=now_N, part=ROW)
        slots_ND = round_rows(slots_ND, old_slots_ND.dtype, key=self._key, ids_N=ids_N, numbers_N=now_N, part=SLOT)
        if not steps.moves_rows_at_rest:
            now_N = torch.where((slots_ND != 0).any(1), now_N, RESTING)
        self.rows_LD[index] = torch.where(overdue_N.unsqueeze(1), rows_ND, old_ND)
        self.slots_LS[index] = torch.where(overdue_N.unsqueeze(1), slots_ND, old_slots_ND)
        self.steps_L[index] = torch.where(overdue_N, now_N, last_N)

    def _arrays_of(
        self, index: RowIndex
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, Ids | None, Ids | None, int]:
        """Return rows, slots and steps for compiled code, the row numbers (None: all), and the id of the first."""
        rows_LD, slots_LS, steps_L, numbers, first = self.rows_LD, self.slots_LS, self.steps_L, None, self.first
        if isinstance(index, slice):
            first += index.indices(self.num_local)[0]
            rows_LD = rows_LD[index]
            slots_LS = None if slots_LS is None else slots_LS[index]
            steps_L = None if steps_L is None else steps_L[index]
        else:
            numbers = index.numpy()
        slots = None if slots_LS is None else as_numpy(slots_LS)
        return as_numpy(rows_LD), slots, None if steps_L is None else steps_L.numpy(), numbers, first

    def _update_compiled(self, index: RowIndex, gradient_ND: Tensor, optimizer: RowOptimizerSpec, scale: float) -> None:
        rows_LD, slots_LS, steps_L, numbers, first = self._arrays_of(index)
        refused = array_update.update(
            self.spec,
            rows_LD,
            slots_LS,
            numbers,
            gradient_ND.numpy(),
            optimizer=optimizer,
            scale=scale,
            steps=steps_L,
            first_id=first,
            ids=None if self.ids.ids_L is None else as_numpy(self.stored.ids(self._numbers(index))),
            catch_up=None if self.steps is None else self.steps.catch_up,
        )
        if refused:
            with self._counting:
                self.refused += refused


def number_rows(
    tables: Sequence[DeviceRows],
    ids_N: Tensor,
    key_N: Tensor,
    place_N: Tensor,
    bits: int,
    pieces: Sequence[tuple[int, int]],
    *,
    makes: bool,
) -> Tensor:
    """Return keys [N] with row numbers in place of ids, where ids have no bound; other keys are unchanged.

    Args:
        tables: The tables, by their numbers in keys.
        ids_N: int64.
        key_N: int64: table << bits, with equal lower bits for equal ids; without a table: len(tables) << bits.
        place_N: int64: piece << 40, with any lower bits.
        bits: Lower bits of a key.
        pieces: Table and number of ids of each piece; the pieces follow one another.
        makes: Whether ids without a row get one, with its first values. If not, the first values are written to free
            rows, where they stay until the next call.

    The host waits for the device only when a table grows. Raises OutOfMemory; no row has changed then.
    """
    for number, rows in enumerate(tables):
        rows.reserve(sum(count for table, count in pieces if table == number))
    with torch.inference_mode(False), torch.no_grad():
        if runs_kernels(ids_N.device):
            hashed = [rows.ids.table for rows in tables]
            found = number_ids(hashed, ids_N, key_N, place_N, bits, pieces, makes=makes)
            written = [None if rows.ids.table is None else (rows.rows_LD, rows.first_values) for rows in tables]
            write_new_rows(written, key_N, bits, ids_N, found.made_N)
            return found.key_N
        numbered_N = key_N.clone()
        for number, rows in enumerate(tables):
            if rows.ids.table is not None:
                places_U = torch.nonzero(key_N >> bits == number)[:, 0]
                numbered_N[places_U] = (number << bits) | rows.number(ids_N[places_U], makes=makes)
        return numbered_N


_STORED = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


def _write(stored: Tensor, scales: Tensor | None, index: RowIndex, values_ND: Tensor) -> None:
    """Overwrite rows; 8 bits are rounded to the nearest, which reproduces rows that were read before."""
    if scales is not None:
        values_ND, scales[index] = narrowed(values_ND, stored.dtype)
    bits = torch.uint8 if stored.itemsize == 1 else stored.dtype  # not every device indexes in float8
    stored.view(bits)[index] = values_ND.view(bits)


def _is_compiled(tensor: Tensor) -> bool:
    """Return whether compiled code handles the tensor; PyTorch handles tensors on a device, or of 16 bits."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _empty(num_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty [num_rows, dim]; on a host in whole huge pages by numpy: random rows cost half."""
    if device.type != "cpu":
        return torch.empty(num_rows, dim, dtype=dtype, device=device)
    num_bytes = num_rows * dim * dtype.itemsize
    memory = np.empty(num_bytes + _HUGE_PAGE, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE  # numpy's own are 16 bytes past a cache line, and so would every row be
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(num_rows, dim)


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return the array's memory as a tensor of ``dtype``, the type of the array."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
