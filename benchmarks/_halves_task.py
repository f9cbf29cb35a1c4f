"""The paper's experiment on glyphs: the fast gear sees the top half of an image, the slow gear the bottom half.

Several workers train one model through dense tables, each with a copy of both parts: what N machines would do, in
turns on one. In a round every worker makes a step with the weights that it pulled after its last one, so its gradients
are N − 1 pushes old, as they are where workers run side by side at one speed.

Legend: B images of a batch, D width of a dense feature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from _gear_task import CACHE
from _gear_trainer import StepClock
from gear_data.halves import HalfBatch, HalvedData, Halves, load_glyph_halves
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

NUM_CLASSES = 200
DIM = 64
BATCH = 64
LEARNING_RATE = 1e-3


class HalfNet(nn.Module):
    """Half an image [B, 1, 16, 32] uint8 -> [B, D]: the same network for both halves."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 32, DIM),
        )

    def forward(self, halves: Tensor) -> Tensor:
        """Features of halves."""
        features: Tensor = self.layers(halves.float() / 255)
        return features


class FastPart(nn.Module):
    """Top halves and the features of the bottom halves -> logits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.tops = HalfNet()
        self.classes = nn.Linear(2 * DIM, num_classes)

    def forward(self, tops: Tensor, bottoms_BD: Tensor) -> Tensor:
        """Logits [B, C]."""
        logits: Tensor = self.classes(functional.relu(torch.cat([self.tops(tops), bottoms_BD], dim=1)))
        return logits


@functools.cache
def glyph_halves(num_classes: int = NUM_CLASSES) -> HalvedData:
    """The data, read once."""
    return load_glyph_halves(CACHE, Console(stderr=True), num_classes=num_classes)


class HalvesWorker:
    """One worker. ``expire_seconds`` None: conventional training of both parts."""

    def __init__(
        self,
        cluster: Cluster,
        data: HalvedData,
        clock: Callable[[], float],
        *,
        expire_seconds: float | None,
        gradients_per_id: int,
        seed: int,
        channels: int = 16,
        ids_per_update: int = BATCH,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fast, self._dense = FastPart(data.num_classes), HalfNet(channels)
        attach = functools.partial(gt.attach, cluster=cluster, optimizer=gt.Adam(LEARNING_RATE), reuse=True)
        self._steps: list[Any] = [attach(self.fast, name="fast")]
        self._data = data
        self.gear: gt.SlowGear | None = None
        if expire_seconds is None:
            self._steps.append(attach(self._dense, name="bottom"))
        else:
            self.gear = gt.SlowGear(
                cluster,
                "bottom",
                dim=DIM,
                expire_seconds=expire_seconds,
                gradients_per_id=gradients_per_id,
                mode="sync",
                build=lambda: self._dense,
                samples=data.train.bottoms,
                optimizer=gt.Adam(LEARNING_RATE),
                reuse=True,
                config=gt.SlowGearConfig(ids_per_update=ids_per_update, clock=clock),
            )
            self._steps.append(gt.RowOptimizer(self.gear))

    def step(self, batch: HalfBatch) -> None:
        """One update."""
        if self.gear is None:
            bottoms_BD = self._dense(self._data.train.bottoms[batch.image_ids])
        else:
            bottoms_BD = self.gear(batch.image_ids)
        loss = functional.cross_entropy(self.fast(batch.tops, bottoms_BD), batch.labels)
        for part in self._steps:
            part.zero_grad()
        loss.backward()
        for part in self._steps:
            part.step()

    def close(self) -> None:
        """End its slow gear."""
        if self.gear is not None:
            self.gear.close()


def accuracy(cluster: Cluster, fast: FastPart, test: Halves, channels: int = 16) -> float:
    """Top-1 of unseen fonts under the cluster's weights of the bottom part and a worker's of the top part."""
    dense = HalfNet(channels)
    gt.attach(dense, cluster, name="bottom", reuse=True, optimizer=gt.Adam(LEARNING_RATE))
    right = 0
    with torch.no_grad():
        for batch in test.in_order(512):
            bottoms_BD = dense(test.bottoms[batch.image_ids - test.first_id])
            right += int((fast(batch.tops, bottoms_BD).argmax(dim=1) == batch.labels).sum())
    return right / len(test)


def convergence(
    num_workers: int,
    rounds: int,
    *,
    step_seconds: float,
    expire_seconds: float | None,
    gradients_per_id: int,
    test_every: int,
    seed: int = 0,
    data: HalvedData | None = None,
) -> list[tuple[int, float]]:
    """(steps of each worker, accuracy) along a run of ``rounds`` steps of every worker."""
    data = glyph_halves() if data is None else data
    test = next(iter(data.tests.values()))
    clock = StepClock(step_seconds)
    with gt.local(num_shards=1) as cluster:
        workers = [
            HalvesWorker(
                cluster, data, clock, expire_seconds=expire_seconds, gradients_per_id=gradients_per_id, seed=seed
            )
            for _ in range(num_workers)
        ]
        streams = [data.train.batches(BATCH, seed=1000 * seed + n, passes=10_000) for n in range(num_workers)]
        curve = list(_rounds(cluster, workers, streams, rounds, clock, test, test_every))
        for worker in workers:
            worker.close()
    return curve


def _rounds(
    cluster: Cluster,
    workers: Sequence[HalvesWorker],
    streams: Sequence[Iterator[HalfBatch]],
    rounds: int,
    clock: StepClock,
    test: Halves,
    test_every: int,
) -> Iterator[tuple[int, float]]:
    for number in range(1, rounds + 1):
        for worker, stream in zip(workers, streams, strict=True):
            worker.step(next(stream))
        clock.tick()
        if number % test_every == 0 or number == rounds:
            yield number, round(accuracy(cluster, workers[0].fast, test), 4)
