"""The gradient batcher under any order of adds, retries, flushes and failures.

The account adds up, to the last gradient, and every due batch is what float64 arithmetic says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import geartrain as gt
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.bridge.gear.gradient_batcher import GradientBatcher

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
        self.gradients_per_id = gradients_per_id
        self.config = gt.SlowGearConfig(
            ids_per_update=ids_per_update,
            reduction=reduction,  # type: ignore[arg-type]
            flush_seconds=flush_seconds,
            stale=stale[0],  # type: ignore[arg-type]
            max_gradient_lag=stale[1],
            clock=lambda: self.now,
        )
        self.ours = GradientBatcher(DIM, gradients_per_id, self.config)
        self.batches: dict[int, Batch] = {}
        self.fates: dict[str, Counter[str]] = {source: Counter() for source in SOURCES}
        self.last: dict[str, tuple[Delivery, int]] = {}
        self.out: dict[int, list[Gradient]] = {}
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
        gradients = self.rng.normal(size=(len(ids), DIM)).astype(np.float32)
        for row, number in enumerate(ids):
            if number in bad:
                gradients[row, number % DIM] = [np.nan, np.inf, -np.inf][number % 3]
        delivery = Delivery(
            source=source,
            incarnation=1,
            sequence=(before[0].sequence if before else 0) + gap,
            ids=np.array(ids, np.int64),
            gradients_KD=gradients,
            versions=self.dense_version - lag + np.arange(len(ids)) % 3,
            lr=None,
        )
        self.last[source] = delivery, self.dense_version
        self.expect(delivery)
        self.ours.add(delivery, self.dense_version)

    def expect(self, delivery: Delivery) -> None:
        self.look()
        fates = self.fates[delivery.source]
        rows, versions = delivery.gradients_KD, delivery.versions.tolist()
        for number, row, version in zip(delivery.ids.tolist(), rows, versions, strict=True):
            fates["received"] += 1
            lag = max(0, self.dense_version - version)
            if not np.isfinite(row).all():
                fates["non_finite"] += 1
            elif self.config.max_gradient_lag is not None and lag > self.config.max_gradient_lag:
                fates["dropped_stale"] += 1
            else:
                factor = 1 / (1 + lag) if self.config.stale == "scale" else 1.0
                batch = self.batches.setdefault(number, Batch(self.now))
                batch.gradients.append(Gradient(delivery.source, factor * row.astype(np.float64)))
        least = self.gradients_per_id
        full = [b for b in self.batches.values() if not b.is_due and len(b.gradients) >= least]
        if sum(len(batch.gradients) for batch in full) >= self.config.ids_per_update * least:
            for batch in full:
                batch.is_due = True

    @rule(source=st.sampled_from(SOURCES))
    def retry(self, source: str) -> None:
        if source in self.last:
            self.ours.add(*self.last[source])

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

    @rule()
    def due(self) -> None:
        batch = self.ours.due()
        if not self.out:
            self.look()
            self.close_overdue()
            due = {number for number, waiting in self.batches.items() if waiting.is_due}
            taken = [] if batch is None else batch.ids.tolist()
            assert set(taken) == due and len(taken) == len(due)
            self.out = {number: self.batches.pop(number).gradients for number in taken}
        if batch is None:
            assert not self.out
            return
        assert batch.ids.tolist() == list(self.out)
        for number, row, count in zip(batch.ids.tolist(), batch.gradients, batch.counts.sum(1).tolist(), strict=True):
            values = [gradient.value for gradient in self.out[number]]
            expected = np.sum(values, axis=0) / (len(values) if self.config.reduction == "mean" else 1)
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
            assert row.dtype == np.float32 and count == len(values)

    def close_overdue(self) -> None:
        flush_seconds = self.config.flush_seconds
        for batch in self.batches.values():
            if flush_seconds is not None and batch.first <= self.now - flush_seconds:
                batch.is_due = True

    @rule()
    def flush(self) -> None:
        self.ours.flush()
        for batch in self.batches.values():
            batch.is_due = True

    @precondition(lambda self: self.out)
    @rule(places=st.sets(st.integers(0, 6)), other=IDS)
    def settle(self, places: set[int], other: list[int]) -> None:
        failed = {*(number for place, number in enumerate(self.out) if place in places), *other}
        self.ours.complete(failed)
        for number, gradients in self.out.items():
            for gradient in gradients:
                self.fates[gradient.source]["dropped_failed" if number in failed else "applied"] += 1
        self.out = {}

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
            if self.config.flush_seconds is None:
                assert account.waiting == sum(g.source == source for g in waiting)
            total += account
        assert total == self.ours.account()


TestGradientBatcherModel = BatcherMachine.TestCase
TestGradientBatcherModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
