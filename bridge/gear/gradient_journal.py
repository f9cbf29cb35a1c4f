"""Journal of waiting gradients in a store, from which the next slow gear continues after this one was killed.

Records are numbered from 1: a counted *delivery*; a batch that was *taken* for an update; an update that is *settled*
(applied). Replayed in order they make the same batches. An update is pushed under a number from its *taken* record and
in the stream that the *head* (record 0) names: if the next process sends it again, shards answer that they have it.
Records are removed when every gradient before them is settled; the head keeps the sources' accounts of that time.

The records survive the process, but not a loss of power: they are not synced to disk.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from geartrain.ams.storage.features.store import FeatureStore
from geartrain.ams.values.errors import StateDamaged
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.bridge.gear.batch_state import DueBatch
from geartrain.bridge.gear.gradient_batcher import GradientBatcher

_MAX_PROCESSES = 64
_READ_AT_ONCE = 256
_SHORT = 256
"""Number of records below which a new head does not pay."""


class GradientJournal:
    """Journal of one dense part, in the format described above. Not thread-safe: call it in the batcher's order.

    Costs one write of the store a delivery, of 4·D + 16 bytes an id, and two small ones an update.
    """

    def __init__(self, store: FeatureStore, *, max_bytes: int) -> None:
        """Read the head. The store must keep records until they are removed. Beyond ``max_bytes`` it :attr:`is_full`.

        Raises StateDamaged.
        """
        self._store = store
        self._max_bytes = max_bytes
        self.acknowledge: Callable[[int], None] = lambda _: None
        """Called with a number below which no update will be pushed again."""
        [head] = store.read(np.zeros(1, np.int64))
        self._head: dict[str, Any] = {
            "stream": uuid.uuid4().hex,
            "processes": [],
            "table": 0,
            "first": 1,
            "updates": 0,
            "accounts": {},
            "sequences": {},
            "incarnations": {},
        }
        if head is not None:
            self._head = json.loads(head)
        elif store.counts().damaged:
            raise StateDamaged(
                f"the head of the gradient journal in store {store.namespace!r} is damaged; empty the store, which "
                "loses the gradients that wait in it"
            )
        self._next: int = self._head["first"]
        self._bytes = 0
        self._taken: DueBatch | None = None
        self._number: int = self._head["updates"]
        self._mark: tuple[int, int, dict[str, Any]] | None = None
        """First record once the batch that is out is settled, bytes of those before, and the head then; None while
        other gradients wait beside that batch."""
        self._incarnations: dict[str, int] = self._head["incarnations"]

    @property
    def stream(self) -> str:
        """Last part of the name of the stream that updates are pushed in."""
        return str(self._head["stream"])

    @property
    def processes(self) -> tuple[str, ...]:
        """Slow gears that have written here, in order."""
        return tuple(self._head["processes"])

    @property
    def is_full(self) -> bool:
        """Whether waiting gradients should be applied, so that records can be removed."""
        return self._bytes > self._max_bytes

    def open(self, table: int, batcher: GradientBatcher) -> dict[str, int]:
        """Replay the records into an empty ``batcher``; return the incarnation of every fast gear.

        Records of another incarnation of the dense table than ``table`` are from before a restore, and are dropped.
        """
        if self._head["table"] != table:
            records = list(self._records())
            updates = max([self._number, *(_header(record).get("taken", 0) for record in records)])
            fresh: dict[str, Any] = {"accounts": {}, "sequences": {}, "incarnations": {}, "updates": updates}
            self._next = max(self._next, self._head["first"] + len(records))
            self._number, self._incarnations = updates, {}
            self._taken = self._mark = None
            self._restart_at(self._next, self._head | fresh | {"table": table})
            self.acknowledge(updates + 1)
            return self._incarnations
        self._next, self._bytes, self._taken, self._mark = self._head["first"], 0, None, None
        batcher.restore(
            {source: GearAccount(**account) for source, account in self._head["accounts"].items()},
            self._head["sequences"],
        )
        for record in self._records():
            self._play(record, batcher)
            self._next += 1
            self._bytes += len(record)
        self.acknowledge(self._number + (self._taken is None))
        return self._incarnations

    def joined(self, process: str) -> None:
        """Record that another slow gear writes here from now on."""
        self._head["processes"] = [*self._head["processes"], process][-_MAX_PROCESSES:]
        self._write_head(self._head)

    def handed_over(self, batcher: GradientBatcher) -> None:
        """Reset the accounts, which the other slow gear has taken over; only the numbers of deliveries stay."""
        if batcher.is_all_taken and self._taken is None:
            self._restart_at(self._next, self._head_now(batcher) | {"accounts": {}, "processes": []})

    def delivered(self, delivery: Delivery, dense_version: int) -> None:
        """Record a delivery before it is counted."""
        said = {name: getattr(delivery, name) for name in ("source", "incarnation", "sequence", "lr")}
        said |= {"version": dense_version, "ids": len(delivery.ids)}
        arrays = (delivery.ids.astype("<i8"), delivery.versions.astype("<i8"), delivery.gradients_KD.astype("<f4"))
        self._append(said, b"".join(part.tobytes() for part in arrays))
        self._incarnations[delivery.source.partition("\t")[0]] = delivery.incarnation

    def taken(self, batch: DueBatch, batcher: GradientBatcher) -> int:
        """Record that ``batch`` was taken for an update; return the number to push it under. Idempotent."""
        if self._taken is not batch:
            self._append({"taken": self._number + 1}, batch.ids.astype("<i8").tobytes())
            self._taken, self._number = batch, self._number + 1
            is_short = self._next - self._head["first"] < _SHORT and not self.is_full
            if not is_short and batcher.is_all_taken:
                self._mark = self._next, self._bytes, self._head_now(batcher)
        return self._number

    def settled(self, failed: list[int]) -> None:
        """Record that the update is in the dense table, but for ``failed`` ids: it is not pushed again."""
        batch = self._taken
        assert batch is not None
        self._append({"settled": failed}, b"")
        self.acknowledge(self._number + 1)
        if self._mark is not None:
            first, gone_bytes, head = self._mark
            kept_bytes = self._bytes - gone_bytes
            self._restart_at(first, head | {"accounts": _settled(head["accounts"], batch, failed)}, kept_bytes)
        self._taken = self._mark = None

    def _play(self, record: bytes, batcher: GradientBatcher) -> None:
        said, rest = _header(record), record.partition(b"\n")[2]
        if "taken" in said:
            self._number = said["taken"]
            self._taken = batcher.pop_again(np.frombuffer(rest, "<i8").astype(np.int64))
        elif "settled" in said:
            if self._taken is not None:
                batcher.complete(said["settled"])
            self._taken = None
        else:
            version, width = said.pop("version"), said.pop("ids")
            keys = np.frombuffer(rest[: 16 * width], "<i8").astype(np.int64)
            rows = np.frombuffer(rest[16 * width :], "<f4").reshape(width, -1)
            delivery = Delivery(**said, ids=keys[:width], versions=keys[width:], gradients_KD=rows)
            batcher.add(delivery, version)
            self._incarnations[delivery.source.partition("\t")[0]] = delivery.incarnation

    def _append(self, said: dict[str, Any], data: bytes) -> None:
        record = json.dumps(said).encode() + b"\n" + data
        self._store.write(np.array([self._next]), [record])
        self._next += 1
        self._bytes += len(record)

    def _records(self) -> Iterator[bytes]:
        """Yield the records up to the first gap."""
        first = self._head["first"]
        while True:
            for record in self._store.read(np.arange(first, first + _READ_AT_ONCE)):
                if record is None:
                    return
                yield record
            first += _READ_AT_ONCE

    def _head_now(self, batcher: GradientBatcher) -> dict[str, Any]:
        accounts = {source: asdict(account) for source, account in batcher.accounts().items()}
        now = {"accounts": accounts, "sequences": batcher.last_sequences(), "incarnations": dict(self._incarnations)}
        return self._head | now | {"updates": self._number}

    def _restart_at(self, first: int, head: dict[str, Any], kept_bytes: int = 0) -> None:
        """Let records start at ``first``, with ``kept_bytes`` of them, and remove earlier ones."""
        gone = np.arange(self._head["first"], first)
        self._write_head(head | {"first": first})
        self._store.remove(gone)
        self._bytes = kept_bytes

    def _write_head(self, head: dict[str, Any]) -> None:
        self._store.write(np.zeros(1, np.int64), [json.dumps(head).encode()])
        self._head = head


def _header(record: bytes) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(record.partition(b"\n")[0])
    return said


def _settled(accounts: dict[str, Any], batch: DueBatch, failed: list[int]) -> dict[str, Any]:
    """Return the accounts as they will be once all due gradients in them are settled."""
    gone = np.isin(batch.ids, failed)
    dropped, applied = batch.counts[gone].sum(0).tolist(), batch.counts[~gone].sum(0).tolist()
    moved = {}
    for column, (source, account) in enumerate(accounts.items()):
        both = account["applied"] + applied[column], account["dropped_failed"] + dropped[column]
        moved[source] = account | {"due": 0, "applied": both[0], "dropped_failed": both[1]}
    return moved
