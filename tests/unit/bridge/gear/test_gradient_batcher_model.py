"""The gradient batcher under any order of adds, retries, flushes and failures.

The account adds up, to the last gradient, and every due batch is what float64 arithmetic says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from geartrain.ams.values.gear_messages import GearAccount
from geartrain.bridge.gear.gradient_batcher import DueBatch, GradientBatcher

DIM = 2
SOURCES = ("a", "b", "c")
IDS = st.lists(st.integers(0, 6), unique=True, max_size=7)


@dataclass
class Gradient:
    source: str
    value: np.ndarray


@dataclass
class Batch:
    first: float
    gradients: list[Gradient] = field(default_factory=list)
    is_due: bool = False


@dataclass
class Call:
    """One add, as it may be sent again."""

    source: str
    sequence: int
    ids: np.ndarray
    gradients: np.ndarray
    versions: np.ndarray
    dense_version: int


class BatcherMachine(RuleBasedStateMachine):
    @initialize(
        gradients_per_id=st.integers(1, 3),
        ids_per_update=st.sampled_from([1, 1, 2, 4]),
        reduction=st.sampled_from(["mean", "sum"]),
        flush_seconds=st.sampled_from([None, 0.0, 5.0]),
        stale=st.sampled_from([("apply", None), ("scale", None), ("drop", 1)]),
    )
    def begin(
        self,
        gradients_per_id: int,
        ids_per_update: int,
        reduction: str,
        flush_seconds: float | None,
        stale: tuple[str, int | None],
    ) -> None:
        self.now = 1000.0
        self.settings: dict[str, Any] = {
            "gradients_per_id": gradients_per_id,
            "ids_per_update": ids_per_update,
            "reduction": reduction,
            "flush_seconds": flush_seconds,
            "stale": stale[0],
            "max_gradient_lag": stale[1],
            "clock": lambda: self.now,
        }
        self.ours = GradientBatcher(DIM, **self.settings)
        self.batches: dict[int, Batch] = {}
        self.fates: dict[str, Counter[str]] = {source: Counter() for source in SOURCES}
        self.last: dict[str, Call] = {}
        self.out: dict[int, list[Gradient]] = {}
        self.number = 0
        self.dense_version = 5
        self.rng = np.random.default_rng(0)

    # What is sent

    @rule(
        source=st.sampled_from(SOURCES),
        ids=IDS,
        gap=st.integers(1, 3),
        bad=st.sets(st.integers(0, 6), max_size=2),
        lag=st.integers(-1, 3),
    )
    def add(self, source: str, ids: list[int], gap: int, bad: set[int], lag: int) -> None:
        before = self.last.get(source)
        sequence = (before.sequence if before else 0) + gap
        gradients = self.rng.normal(size=(len(ids), DIM)).astype(np.float32)
        for row, one in enumerate(ids):
            if one in bad:
                gradients[row, one % DIM] = [np.nan, np.inf, -np.inf][one % 3]
        versions = self.dense_version - lag + np.arange(len(ids)) % 3
        call = Call(source, sequence, np.array(ids, np.int64), gradients, versions, self.dense_version)
        self.last[source] = call
        self.expect(call)
        self.send(call)

    def send(self, call: Call) -> GearAccount:
        return self.ours.add(
            call.source,
            call.sequence,
            call.ids,
            call.gradients,
            call.versions,
            dense_version=call.dense_version,
        )

    def expect(self, call: Call) -> None:
        self.look()
        fates = self.fates[call.source]
        for one, row, version in zip(call.ids.tolist(), call.gradients, call.versions.tolist(), strict=True):
            fates["received"] += 1
            lag = max(0, call.dense_version - version)
            if not np.isfinite(row).all():
                fates["non_finite"] += 1
            elif self.settings["stale"] == "drop" and lag > self.settings["max_gradient_lag"]:
                fates["dropped_stale"] += 1
            else:
                factor = 1 / (1 + lag) if self.settings["stale"] == "scale" else 1.0
                batch = self.batches.setdefault(one, Batch(self.now))
                batch.gradients.append(Gradient(call.source, factor * row.astype(np.float64)))
        least = self.settings["gradients_per_id"]
        full = [b for b in self.batches.values() if not b.is_due and len(b.gradients) >= least]
        if sum(len(batch.gradients) for batch in full) >= self.settings["ids_per_update"] * least:
            for batch in full:
                batch.is_due = True

    @rule(source=st.sampled_from(SOURCES))
    def retry(self, source: str) -> None:
        if source in self.last:
            self.send(self.last[source])

    @rule(updates=st.integers(1, 2))
    def train(self, updates: int) -> None:
        self.dense_version += updates

    @rule(seconds=st.sampled_from([0.1, 3.0, 5.0, -1.0, -100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> None:
        """The clock may have been set back since the last look, which new gradients and a question for a batch are."""
        for batch in self.batches.values():
            batch.first = min(batch.first, self.now)

    # What is taken

    @rule(limit=st.none() | st.integers(1, 4))
    def due(self, limit: int | None) -> None:
        batch: DueBatch | None = self.ours.due(limit)
        if not self.out:
            self.look()
            self.close_overdue()
            self.take(batch, limit)
        if batch is None:
            assert not self.out
            return
        assert batch.number == self.number
        assert batch.ids.tolist() == list(self.out)
        for one, row, count in zip(batch.ids.tolist(), batch.gradients, batch.counts.tolist(), strict=True):
            values = [gradient.value for gradient in self.out[one]]
            expected = np.sum(values, axis=0) / (len(values) if self.settings["reduction"] == "mean" else 1)
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
            assert row.dtype == np.float32 and count == len(values)

    def close_overdue(self) -> None:
        flush_seconds = self.settings["flush_seconds"]
        for batch in self.batches.values():
            if flush_seconds is not None and batch.first <= self.now - flush_seconds:
                batch.is_due = True

    def take(self, batch: DueBatch | None, limit: int | None) -> None:
        due = {one for one, waiting in self.batches.items() if waiting.is_due}
        expected = len(due) if limit is None else min(limit, len(due))
        taken = [] if batch is None else batch.ids.tolist()
        assert len(taken) == expected and set(taken) <= due
        self.number += bool(taken)
        self.out = {one: self.batches.pop(one).gradients for one in taken}

    @rule()
    def flush(self) -> None:
        self.ours.flush()
        for batch in self.batches.values():
            batch.is_due = True

    @precondition(lambda self: self.out)
    @rule()
    def done(self) -> None:
        self.ours.done(self.number)
        self.settle(self.out, "applied")

    @precondition(lambda self: self.out)
    @rule(places=st.sets(st.integers(0, 6), min_size=1), other=IDS)
    def fail(self, places: set[int], other: list[int]) -> None:
        ids = [*(one for place, one in enumerate(self.out) if place in places), *other]
        self.ours.failed(self.number, dict.fromkeys(ids, "no sample"))
        self.settle({one: self.out[one] for one in ids if one in self.out}, "dropped_failed")

    @precondition(lambda self: self.number)
    @rule()
    def repeat_done(self) -> None:
        if not self.out:
            self.ours.done(self.number)
            self.ours.failed(self.number, {1: "no sample"})

    def settle(self, gradients: dict[int, list[Gradient]], fate: str) -> None:
        for one, some in gradients.items():
            for gradient in some:
                self.fates[gradient.source][fate] += 1
            self.out = {other: rest for other, rest in self.out.items() if other != one}

    @invariant()
    def the_account_adds_up(self) -> None:
        if not hasattr(self, "ours"):
            return
        total = GearAccount()
        for source in SOURCES:
            account = self.ours.account(source)
            waiting = [g for batch in self.batches.values() if not batch.is_due for g in batch.gradients]
            due = [g for batch in self.batches.values() if batch.is_due for g in batch.gradients]
            out = [g for some in self.out.values() for g in some]
            in_hand = sum(g.source == source for g in [*waiting, *due, *out])
            fates = self.fates[source]
            others = vars(account) | {"received": 0}
            assert account.received == fates["received"] == sum(others.values())
            assert account.waiting + account.due == in_hand
            for fate in ("applied", "dropped_stale", "dropped_failed", "non_finite"):
                assert getattr(account, fate) == fates[fate], fate
            if self.settings["flush_seconds"] is None:
                assert account.waiting == sum(g.source == source for g in waiting)
            total += account
        assert total == self.ours.account()


TestGradientBatcherModel = BatcherMachine.TestCase
TestGradientBatcherModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
