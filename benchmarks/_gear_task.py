"""The task of the gear benches: page views, with a network in two parts of which one costs so many times the other.

Legend: B views of a batch, D width of a dense feature, I images, K distinct ids, S side of an image.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from gear_data.page_views import PageViews, Views, load_page_views
from torch import Tensor, nn
from torch.nn import functional

from geartrain.workers.ctr.metrics import auc

CACHE = Path(".cache")
DIM = 64
ROW_DIM = 32
CHANNELS = 16
FAST_HIDDEN = 512
BATCH = 128
LEARNING_RATE = 1e-3
THREADS = 1


class CreativeNet(nn.Module):
    """The dense part: images [B, 1, S, S] uint8 -> [B, D]. Each block adds the same arithmetic."""

    def __init__(self, blocks: int, channels: int = CHANNELS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.norm = nn.GroupNorm(4, channels)
        self.head = nn.Linear(channels * 16, DIM)

    def forward(self, images: Tensor) -> Tensor:
        """Features of images."""
        maps = functional.relu(self.stem(images.float() / 255))
        for block in self.blocks:
            maps = maps + 0.5 * functional.relu(block(maps))
        pooled = functional.adaptive_avg_pool2d(self.norm(maps), 4)
        features: Tensor = self.head(pooled.flatten(1))
        return features


class ViewNet(nn.Module):
    """The sparse part: rows of users and movies, and the dense feature of what was shown -> logits [B]."""

    def __init__(self, num_users: int, num_movies: int, hidden: int = FAST_HIDDEN) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, ROW_DIM)
        self.movies = nn.Embedding(num_movies, ROW_DIM)
        for rows in (self.users, self.movies):
            nn.init.normal_(rows.weight, std=0.05)
        self.layers = nn.Sequential(
            nn.Linear(2 * ROW_DIM + DIM, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, views: Views, features_BD: Tensor) -> Tensor:
        """Logits of the views."""
        joined = torch.cat([self.users(views.users), self.movies(views.movies), features_BD], dim=1)
        logits: Tensor = self.layers(joined)[:, 0]
        return logits


def build_dense(blocks: int, seed: int) -> CreativeNet:
    """The dense part with initial weights that depend on the arguments alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        return CreativeNet(blocks)


def build_fast(data: PageViews, seed: int) -> ViewNet:
    """The sparse part, likewise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2000 + seed)
        return ViewNet(data.num_users, data.num_movies)


@functools.cache
def page_views(images_per_movie: int = 2) -> PageViews:
    """The data, read once."""
    return load_page_views(CACHE, images_per_movie=images_per_movie)


def recurring(data: PageViews, num_ids: int, recurrences: int, *, seed: int) -> Iterator[Views]:
    """Batches of training views, their images replaced so that each of ``num_ids`` ids is asked for exactly so often.

    A batch has distinct ids: BATCH of a new order of all ids, ``recurrences`` orders. ``num_ids`` is a multiple of
    BATCH. (The labels are those of other images: for timing only.)
    """
    random = np.random.default_rng((seed, num_ids))
    for _ in range(recurrences):
        order = torch.from_numpy(random.permutation(num_ids))
        for start in range(0, num_ids, BATCH):
            views = data.train.rows(torch.from_numpy(random.integers(len(data.train), size=BATCH)))
            yield Views(views.users, views.movies, order[start : start + BATCH], views.labels)


def test_auc(data: PageViews, dense: nn.Module, fast: ViewNet) -> float:
    """AUC over all test views under the weights given."""
    with torch.no_grad():
        features_ID = torch.cat([dense(part) for part in torch.split(data.pictures, 512)])
        logits = fast(data.test, features_ID[data.test.images])
    return auc(logits.numpy(), data.test.labels.numpy())


def blocks_for(ratio: float, data: PageViews, *, rounds: int = 7) -> tuple[int, float]:
    """(blocks, measured ratio): how deep the dense part must be for its step to cost ``ratio`` times the sparse one's.

    A step is forward, backward and update of a part, for one batch. Parts of 1 and of 5 blocks and the sparse part
    take turns; the cost of a block follows from the difference. The least of each is taken, since whatever disturbs a
    measurement makes it longer.
    """
    views = data.train.rows(torch.arange(BATCH))
    pictures = data.pictures[:BATCH]

    def measured(*depths: int) -> list[float]:
        parts = [fast_step(data, views), *(_dense_step(blocks, pictures) for blocks in depths)]
        alone, *dense = min_seconds(parts, rounds)
        return [cost / alone for cost in dense]

    shallow, deep = measured(1, 5)
    blocks = max(1, round(1 + (ratio - shallow) / max((deep - shallow) / 4, 1e-9)))
    (found,) = measured(blocks)
    for _ in range(2):  # a shallow and a deep network do not cost the same a block
        better = max(1, round(blocks * ratio / found))
        if better == blocks:
            break
        blocks, (found,) = better, measured(better)
    return blocks, found


def min_seconds(steps: Sequence[functools.partial[None]], rounds: int) -> list[float]:
    """The least seconds of each of ``steps``, which take turns. Of this thread's computing: another
    process that wants the same core lengthens the time on the wall far more."""
    least = [float("inf")] * len(steps)
    for number in range(rounds + 1):
        for place, step in enumerate(steps):
            started = time.thread_time()
            step()
            if number:  # the first warms up
                least[place] = min(least[place], time.thread_time() - started)
    return least


def _dense_step(blocks: int, pictures: Tensor) -> functools.partial[None]:
    module = build_dense(blocks, 0)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        module(pictures).square().mean().backward()
        optimizer.step()

    return functools.partial(step)


def fast_step(data: PageViews, views: Views) -> functools.partial[None]:
    """A step of the sparse part alone."""
    fast = build_fast(data, 0)
    optimizer = torch.optim.Adam(fast.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        features_BD = torch.zeros(BATCH, DIM, requires_grad=True)
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(fast(views, features_BD), views.labels).backward()
        optimizer.step()

    return functools.partial(step)
