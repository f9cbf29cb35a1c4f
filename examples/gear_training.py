"""Gear training on page views: users and movies in the fast gear, the pictures that were shown in a slow one.

The data are MovieLens-100K users and drawn glyphs as advertisements (30 MB to fetch, once; see
examples/gear_data/page_views.py for what is real in them). The slow gear runs in this process:

    python examples/gear_training.py

or, with a cluster (geartrain up) and slow gears of their own, which any number of fast gears share:

    PYTHONPATH=examples geartrain slowgear --scheduler 127.0.0.1:7000 --name creative --dim 64 \\
        --module gear_training:build --samples gear_training:samples --optimizer adam:0.001 \\
        --gradients-per-id 4 --ids-per-update 128 --train-mode never
    python examples/gear_training.py --scheduler 127.0.0.1:7000
"""

import argparse
import functools
import itertools
import os
import time
from pathlib import Path

import torch
from gear_data.page_views import PageViews, load_page_views
from torch import nn
from torch.nn import functional

import geartrain as gt
from geartrain.workers.ctr.metrics import auc

DIM, BATCH, STEPS = 64, 128, 625


@functools.cache
def page_views() -> PageViews:
    return load_page_views(Path(os.environ.get("GEARTRAIN_CACHE", ".cache")))


def build() -> nn.Module:
    """The dense part: what the slow gears compute, [B, 1, 32, 32] -> [B, DIM]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, DIM),
    )


def samples(image_id: int) -> torch.Tensor:
    """The raw sample of an id."""
    return page_views().picture(image_id)


class Viewer(nn.Module):
    """The sparse part: what the fast gear trains."""

    def __init__(self, num_users: int, num_movies: int) -> None:
        super().__init__()
        self.users, self.movies = nn.Embedding(num_users, 32), nn.Embedding(num_movies, 32)
        for rows in (self.users, self.movies):
            nn.init.normal_(rows.weight, std=0.05)
        self.layers = nn.Sequential(nn.Linear(64 + DIM, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, users: torch.Tensor, movies: torch.Tensor, picture_features: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.users(users), self.movies(movies), picture_features], dim=1))[:, 0]


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", help="address of a running cluster with slow gears")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args(arguments)

    data = page_views()
    torch.manual_seed(0)
    viewer = Viewer(data.num_users, data.num_movies)
    embedded = {
        "build": build,
        "samples": data.pictures.float() / 255,
        "optimizer": gt.Adam(1e-3),
        "config": gt.SlowGearConfig(
            ids_per_update=BATCH,  # a dense update is worth while for as many ids as a batch has
            train_mode="never",  # no layer of the dense part is another one in training
        ),
    }
    with gt.connect(chosen.scheduler) if chosen.scheduler else gt.local() as cluster:
        image = gt.SlowGear(
            cluster,
            "creative",
            dim=DIM,
            expire_seconds=20,  # a feature is computed again when it is older than that,
            max_version_lag=4,  # or more dense updates behind;
            gradients_per_id=4,  # its gradients go back through the dense part four at a time
            **({} if chosen.scheduler else embedded),
        )
        optimizer, rows = torch.optim.Adam(viewer.parameters(), lr=1e-3), gt.RowOptimizer(image, lr=1e-3)
        started = time.perf_counter()
        batches = data.train.batches(BATCH, seed=0, passes=1 + chosen.steps * BATCH // len(data.train))
        for step, views in enumerate(itertools.islice(batches, chosen.steps)):
            logits = viewer(views.users, views.movies, image(views.images))
            loss = functional.binary_cross_entropy_with_logits(logits, views.labels)
            optimizer.zero_grad()
            rows.zero_grad()
            loss.backward()
            optimizer.step()
            rows.step()  # delivers the gradients of the features
            if step % 100 == 0:
                print(f"step {step:4d}  loss {float(loss.detach()):.3f}", flush=True)
        image.flush()
        seconds = time.perf_counter() - started

        image.eval()  # features without a gradient
        viewer.eval()
        with torch.no_grad():
            logits = viewer(data.test.users, data.test.movies, image(data.test.images))
        found = auc(logits.numpy(), data.test.labels.numpy())
        account, hit_rate = image.account(), image.cache.report()["hit_rate"]
        print(f"{chosen.steps} steps in {seconds:.1f} s; {100 * hit_rate:.0f} % of the features came out of the cache")
        print(f"{account.received:,} gradients delivered, {account.applied:,} applied, {account.waiting:,} waiting")
        print(f"AUC of {len(data.test):,} test views: {found:.3f}")
        image.close()
    return found


if __name__ == "__main__":
    main()
