"""Gear training of the benches' task, embedded in one process, on a clock that runs only while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from _gear_task import BATCH, DIM, LEARNING_RATE, build_dense, build_fast, test_auc
from gear_data.page_views import PageViews, Views
from torch.nn import functional

import geartrain as gt


class TrainingClock:
    """Seconds of training, ``speed`` times as fast as real ones; it stands still outside :meth:`running`.

    So rivals can take turns without ageing each other's features, and a run of seconds can have the expiry of one of
    minutes: a feature then lives as many steps as it would in the longer run.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.real_seconds = 0.0
        """Seconds that :meth:`running` took so far, not scaled."""
        self._started: float | None = None

    def __call__(self) -> float:
        """Unix-like seconds on this clock."""
        started = self._started
        running = 0.0 if started is None else time.perf_counter() - started
        return 1e9 + self.speed * (self.real_seconds + running)

    def tick(self) -> None:
        """A step was made."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run during the block."""
        self._started = time.perf_counter()
        try:
            yield
        finally:
            self.real_seconds += time.perf_counter() - self._started
            self._started = None


class StepClock(TrainingClock):
    """Every step lasts ``step_seconds`` on it, however long it took: a run is the same on every machine."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds = step_seconds
        self._steps = 0

    def __call__(self) -> float:
        """Unix-like seconds on this clock."""
        return 1e9 + self._steps * self._step_seconds

    def tick(self) -> None:
        """A step was made."""
        self._steps += 1


class GearTrainer:
    """The same two parts as the rival's: the sparse one trained here, the dense one by a slow gear of this process."""

    def __init__(
        self,
        data: PageViews,
        clock: TrainingClock,
        *,
        blocks: int,
        expire_seconds: float,
        gradients_per_id: int,
        ids_per_update: int = BATCH,
        mode: Literal["async", "sync"] = "sync",
        seed: int = 0,
        lr: float = LEARNING_RATE,
    ) -> None:
        self._data = data
        self._cluster = gt.local(num_shards=1)
        self.gear = gt.SlowGear(
            self._cluster,
            "creative",
            dim=DIM,
            expire_seconds=expire_seconds,
            gradients_per_id=gradients_per_id,
            mode=mode,
            build=lambda: build_dense(blocks, seed),
            samples=data.pictures,
            optimizer=gt.Adam(lr),
            config=gt.SlowGearConfig(ids_per_update=ids_per_update, train_mode="never", clock=clock),
        )
        self.fast = build_fast(data, seed)
        self._blocks = blocks
        self._optimizer = torch.optim.Adam(self.fast.parameters(), lr=lr, fused=True)
        self._rows = gt.RowOptimizer(self.gear)
        self._current = build_dense(blocks, seed)
        self._reader = gt.attach(self._current, self._cluster, name="creative", reuse=True)

    def step(self, views: Views) -> None:
        """One update of the sparse part; of the dense one when gradients are due."""
        logits = self.fast(views, self.gear(views.images))
        loss = functional.binary_cross_entropy_with_logits(logits, views.labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._rows.step()

    def drain(self) -> None:
        """Wait for the dense updates that are due."""
        while self.gear.account().due:
            time.sleep(0.0005)

    def flush(self) -> None:
        """Apply the gradients that wait."""
        self.gear.flush()

    def auc(self) -> float:
        """On the test views, their features computed with today's dense weights."""
        self._reader.refresh()
        return test_auc(self._data, self._current, self.fast)

    @property
    def dense_version(self) -> int:
        """Dense updates made, and the first values."""
        self._reader.refresh()
        return self._reader.version

    @property
    def hit_rate(self) -> float:
        """Part of the features that came out of the worker's cache."""
        return float(self.gear.cache.report()["hit_rate"])

    def close(self) -> None:
        """Apply what waits; end the slow gear and its cluster."""
        self.gear.close()
        self._cluster.close()
