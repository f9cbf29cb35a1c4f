"""Samples of XDL's own model in which users come again and again: 23 fields of one id, 15 of them the user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import geartrain as gt

IDS = 100_000
USER_FIELDS = [f"user{n}" for n in range(15)]
OTHER_FIELDS = [f"item{n}" for n in range(8)]
FIELDS = USER_FIELDS + OTHER_FIELDS
REPETITION = 57
"""Samples of a user on the average, as in the public set of XDL's evaluation."""


def write_samples(folder: Path, count: int, repetition: float, seed: int = 0) -> tuple[Path, Path]:
    """Write ``count`` samples, neighbours of one user each ``repetition`` times on the average (geometric).

    Returns the plain file and the folder of trees. Ids of users are even, those of items Zipf.
    """
    random = np.random.default_rng(seed)
    num_users = max(1, round(count / repetition))
    lengths = random.geometric(1 / repetition, num_users)
    of_user = np.repeat(np.arange(num_users), lengths)[:count]
    if len(of_user) < count:
        of_user = np.concatenate([of_user, np.full(count - len(of_user), num_users - 1)])
    ranks = 1.0 / np.arange(1, IDS + 1)
    zipf = np.cumsum(ranks / ranks.sum())
    columns = {name: random.integers(0, IDS, num_users)[of_user] for name in USER_FIELDS}
    columns |= {name: np.minimum(np.searchsorted(zipf, random.random(count)), IDS - 1) for name in OTHER_FIELDS}
    columns["click"] = (random.random(count) < 0.3).astype(np.float32)
    plain, trees = folder / f"plain-{repetition}-{seed}.parquet", folder / f"trees-{repetition}-{seed}"
    pq.write_table(pa.table(columns), plain, row_group_size=65_536, compression="zstd")
    gt.compress_samples(plain, trees, {"user": USER_FIELDS, "item": OTHER_FIELDS})
    return plain, trees


def shuffle_rows(plain: Path, mixed: Path) -> None:
    """Write the samples of one file to another in an order of chance, as they come in time."""
    table = pq.read_table(plain)
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(pa.array(order)), mixed, row_group_size=65_536, compression="zstd")
