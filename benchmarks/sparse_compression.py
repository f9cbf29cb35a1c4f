"""Training with samples as prefix trees, with recurring users: against plain samples, and against torch.

XDL's own model: 23 fields of one id, 15 of them the user's and 57 times the same on the average, dim 18, an MLP
200-80-1, batch 5,000. With trees the user's ids are looked up once and the first layer is split by level. The rival
torch is ``nn.EmbeddingBag(sparse=True)`` for each field and ``torch.optim.Adagrad``, on the plain samples. Dense
weights have ``torch.optim.Adagrad`` on all sides. Seconds of processors count all threads, also those of the shard, and
say less of what else the machine does. ``--full``: also the curves over repetition and batch (XDL's Fig. 6 and 7);
sparse_workers.py has the curve over workers (Fig. 8).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import median_seconds, result, threads
from _repeated_users import FIELDS, IDS, REPETITION, shuffle_rows, write_samples
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.launch.bench import Result

DIM, BATCH, LR = 18, 5000, 0.05
ROUNDS, CALLS = 3, 8
REPETITIONS = (1, 5, 10, 20, REPETITION)
BATCHES = (500, 1000, 5000, 10_000, 50_000)
COUNT = 200_000
PLAIN, TORCH = "plain samples", "EmbeddingBag(sparse=True), torch Adagrad"
TARGETS = {PLAIN: 1.5, TORCH: 3.0}
MODEL = f"{len(FIELDS)} fields, {IDS:,} ids each, D={DIM}, MLP 200-80-1"
Step = Callable[[Any], object]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of samples with repeated users; ``full``: also the curves."""
    with tempfile.TemporaryDirectory() as folder, gt.local() as cluster:
        sides = Sides(cluster)
        files = write_samples(Path(folder), COUNT, REPETITION)
        case = f"{MODEL}, user {REPETITION} times, batch {BATCH:,}"
        yield from _bytes(*files)
        seconds = sides.seconds(*files, BATCH)
        yield from _results(f"a step, {case}", seconds, TARGETS)
        yield from _results(f"a step, processors, {case}", sides.seconds(*files, BATCH, clock=time.process_time))
        if full:
            for what, number, found in curves(sides, Path(folder)):
                yield from _results(f"reading and a step, processors, {MODEL}, {what} {number:,}", found)


def curves(sides: Sides, folder: Path) -> Iterator[tuple[str, int, list[float]]]:
    """Of each point of the curves: which, where, and seconds of processors of reading and a step, as of Sides."""
    for repetition in REPETITIONS:
        files = write_samples(folder, COUNT, repetition, seed=1)
        yield "user times", repetition, sides.seconds(*files, BATCH, reading=True, rounds=1, clock=time.process_time)
    for batch in BATCHES:  # of the last files
        yield "batch", batch, sides.seconds(*files, batch, reading=True, rounds=1, clock=time.process_time)


def _results(case: str, seconds: list[float], targets: dict[str, float] | None = None) -> Iterator[Result]:
    for rival, theirs in zip((PLAIN, TORCH), seconds[1:], strict=True):
        target = None if targets is None else targets[rival]
        yield result(f"{case}: sample trees", 1e3 * seconds[0], rival, 1e3 * theirs, "ms", target=target)


def _bytes(plain: Path, trees: Path) -> Iterator[Result]:
    ours = sum(path.stat().st_size for path in trees.iterdir()) / COUNT
    mixed = plain.with_name("mixed.parquet")
    shuffle_rows(plain, mixed)
    case = f"bytes of a sample on disk (zstd), {len(FIELDS)} fields, user {REPETITION} times: sample trees"
    for rival, path in (("Parquet, users side by side", plain), ("Parquet, samples mixed", mixed)):
        yield result(case, ours, rival, path.stat().st_size / COUNT, "bytes")


class Sides:
    """The same model three times, each with rows of its own: with trees, with plain samples, of torch."""

    def __init__(self, cluster: Cluster) -> None:
        self._steps = [our_step(cluster, side, is_split=side == "trees") for side in ("trees", "plain")] + [_torch()]

    def seconds(
        self,
        plain: Path,
        trees: Path,
        batch_size: int,
        *,
        reading: bool = False,
        rounds: int = ROUNDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[float]:
        """Median seconds of a step of each side, also of reading its batch if ``reading``.

        Seconds of processors are those of one thread of torch: several would count how long they wait for each other.
        """
        sources = [gt.TreeSamples(trees, batch_size=batch_size)]
        sources += [gt.ParquetSamples(plain, batch_size=batch_size) for _ in range(2)]
        batches = [endless(source, batch_size) for source in sources]
        calls = CALLS if batch_size <= 2 * BATCH else CALLS // 2

        def side(number: int) -> Step:
            step, own = self._steps[number], batches[number]
            if reading:
                return lambda _: step(next(own))
            return lambda drawn: step(drawn[number])

        def draw() -> list[Any]:
            return [] if reading else [next(own) for own in batches]

        with threads(1 if clock is time.process_time else torch.get_num_threads()):
            sides = [side(number) for number in range(3)]
            return median_seconds(sides, draw, rounds=rounds, calls=calls, uncounted=calls // 4, clock=clock)


def endless(samples: Any, batch_size: int) -> Iterator[Any]:
    """Whole batches of the samples, epoch after epoch."""
    while True:
        yield from (batch for batch in samples if batch.num_samples == batch_size)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(200, 80), nn.ReLU(inplace=True), nn.Linear(80, 1))


def _loss(logits: Tensor, clicks: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


def our_step(
    cluster: Cluster, name: str, *, is_split: bool, with_others: bool = False, makes_rows: bool = True
) -> Step:
    """A training step of the model; gives its loss.

    Args:
        cluster: where rows lie.
        name: of what lies there.
        is_split: batches are trees: users' ids are looked up once, and the first layer is split by level.
        with_others: other workers train the same model: dense weights lie in the cluster, too, and nobody waits.
        makes_rows: make every row, so that none is created during a timing.
    """
    fields = gt.EmbeddingGroup(
        cluster,
        name,
        [gt.Field(field, dim=DIM) for field in FIELDS],
        optimizer=gt.Adagrad(LR),
        mode="async",
        per_node=is_split,
        reuse=with_others,
    )
    first: nn.Module = (
        gt.LevelLinear(dict.fromkeys(FIELDS, DIM), 200) if is_split else nn.Linear(DIM * len(FIELDS), 200)
    )
    rest = _mlp()
    network = nn.ModuleList([first, rest])
    dense: torch.optim.Optimizer = torch.optim.Adagrad(network.parameters(), lr=LR)
    if with_others:
        dense = gt.attach(network, cluster, name=f"{name}/dense", optimizer=gt.Adagrad(LR), mode="async", reuse=True)
    rows = gt.RowOptimizer(fields)
    if makes_rows:
        for field in FIELDS:
            fields.table(field).push(np.arange(IDS), np.full((IDS, DIM), 1e-3, np.float32))

    def step(batch: Any) -> Tensor:
        vectors = fields(batch)
        hidden = first(vectors, batch) if is_split else first(torch.cat([vectors[field] for field in FIELDS], dim=1))
        loss = _loss(rest(hidden), batch["click"])
        loss.backward()
        dense.step()
        rows.step()
        dense.zero_grad()
        rows.zero_grad()
        return loss.detach()

    return step


def _torch() -> Step:
    bags = [nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True) for _ in FIELDS]
    first, rest = nn.Linear(DIM * len(FIELDS), 200), _mlp()
    sparse = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR)
    dense = torch.optim.Adagrad([*first.parameters(), *rest.parameters()], lr=LR)

    def step(batch: Any) -> None:
        offsets = torch.arange(len(batch["click"]))
        vectors = [bag(batch[field], offsets) for bag, field in zip(bags, FIELDS, strict=True)]
        _loss(rest(first(torch.cat(vectors, dim=1))), batch["click"]).backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()

    return step
