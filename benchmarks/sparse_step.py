"""The sparse part of a training step, all of it: look up, pool, gradients, Adagrad; 26 fields, against torch.

Batch 4,096, one id a bag, 1 M ids a field, dim 16; half of the fields have Zipf keys, the others even ones. The rival
is ``nn.EmbeddingBag(sparse=True)`` for each field and ``torch.optim.Adagrad``. What stands between, a sum of products
with fixed numbers, is the same for all sides and small.

And all of a step of a small model, as a first try has it: 18 fields of 1,111 ids, batch 1,024, Adam, embedded. The
rival is ``nn.Embedding`` and ``torch.optim.Adam``; both by the time of one processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from _common import median_seconds, result, threads
from _up import running_cluster
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.launch.bench import Result

FIELDS, IDS, DIM, BATCH, SHARDS = 26, 1_000_000, 16, 4096, 2
LR = 0.05
ROUNDS = 3
TARGETS = {"embedded": 3.5, "2 shards of this machine": 2.0}
Batch = dict[str, Tensor]
Step = Callable[[Batch], None]
NAMES = [f"f{n}" for n in range(FIELDS)]
SMALL_NAMES, SMALL_IDS, SMALL_BATCH, SMALL_TARGET = NAMES[:18], 1_111, 1024, 1.0


def results(full: bool = False) -> Iterator[Result]:
    """Yield the step cases of ``geartrain bench sparse``; ``full`` takes five times as many turns."""
    with running_cluster(SHARDS) as up, ExitStack() as ends:
        clusters = {"embedded": gt.local(), "2 shards of this machine": gt.connect(up["scheduler"])}
        sides = [_ours(ends.enter_context(cluster)) for cluster in clusters.values()]
        draw = _draws()
        seconds = median_seconds([*sides, _torch()], draw, rounds=ROUNDS * (5 if full else 1), calls=12)
    case = f"sparse part of a step, {FIELDS} fields, {IDS:,} ids each, D={DIM}, batch {BATCH:,}, Adagrad"
    for way, ours in zip(clusters, seconds, strict=False):
        rival = "EmbeddingBag(sparse=True), torch.optim.Adagrad"
        yield result(f"{case}, {way}", 1e3 * ours, rival, 1e3 * seconds[-1], "ms", target=TARGETS[way])
    yield _small_model(ROUNDS * (5 if full else 1))


def _small_model(rounds: int) -> Result:
    random = np.random.default_rng(0)

    def draw() -> Batch:
        return {name: torch.from_numpy(random.integers(0, SMALL_IDS, SMALL_BATCH)) for name in SMALL_NAMES}

    def dense() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(len(SMALL_NAMES) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))
        return net, torch.optim.Adam(net.parameters())

    def side(net: nn.Module, look_up: Callable[[Batch], Iterator[Tensor]], optimizer: torch.optim.Optimizer) -> Step:
        def step(batch: Batch) -> None:
            net(torch.cat(list(look_up(batch)), 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with threads(1), gt.local() as cluster:
        fields = gt.EmbeddingGroup(
            cluster, "small", [gt.Field(name, dim=DIM) for name in SMALL_NAMES], optimizer=gt.Adam(1e-3)
        )
        net, adam = dense()
        ours = side(net, lambda batch: iter(fields(batch).values()), gt.joint(adam, fields))
        embeddings = nn.ModuleDict({name: nn.Embedding(SMALL_IDS, DIM) for name in SMALL_NAMES})
        net, adam = dense()
        adam.add_param_group({"params": embeddings.parameters()})
        theirs = side(net, lambda batch: (embeddings[name](batch[name]) for name in SMALL_NAMES), adam)
        seconds = median_seconds([ours, theirs], draw, rounds=rounds, calls=40, clock=time.process_time)
    case = f"step of a small model, {len(SMALL_NAMES)} fields, {SMALL_IDS:,} ids each, D={DIM}, batch {SMALL_BATCH:,}"
    rival = "nn.Embedding, torch.optim.Adam"
    return result(
        f"{case}, Adam, embedded, one thread", 1e3 * seconds[0], rival, 1e3 * seconds[1], "ms", target=SMALL_TARGET
    )


def _draws() -> Callable[[], Batch]:
    """Batches of one id a bag, a stream without end."""
    random = np.random.default_rng(0)
    ranks = 1.0 / np.arange(1, IDS + 1)
    zipf = np.cumsum(ranks / ranks.sum())

    def draw() -> Batch:
        ids = [
            np.searchsorted(zipf, random.random(BATCH)) if n % 2 else random.integers(0, IDS, BATCH)
            for n in range(FIELDS)
        ]
        return {name: torch.from_numpy(np.minimum(own, IDS - 1)) for name, own in zip(NAMES, ids, strict=True)}

    return draw


def _loss(vectors: list[Tensor], upstream: Tensor) -> Tensor:
    """Something whose gradient differs for every vector."""
    return torch.stack([(vector * upstream).sum() for vector in vectors]).sum()


def _ours(cluster: Cluster) -> Callable[[Batch], None]:
    fields = gt.EmbeddingGroup(cluster, "bench", [gt.Field(name, dim=DIM) for name in NAMES], optimizer=gt.Adagrad(LR))
    for name in NAMES:
        _fill(fields.table(name))
    rows, upstream = gt.RowOptimizer(fields), torch.randn(BATCH, DIM)

    def step(batch: Batch) -> None:
        _loss(list(fields(batch).values()), upstream).backward()
        rows.step()
        rows.zero_grad()

    return step


def _fill(table: Table) -> None:
    """Make every row, so that none is created during a timing."""
    for start in range(0, IDS, 100_000):
        table.push(np.arange(start, start + 100_000), np.full((100_000, DIM), 1e-3, np.float32))


def _torch() -> Callable[[Batch], None]:
    bags = [nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True) for _ in NAMES]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR)
    offsets, upstream = torch.arange(BATCH), torch.randn(BATCH, DIM)

    def step(batch: Batch) -> None:
        _loss([bag(batch[name], offsets) for bag, name in zip(bags, NAMES, strict=True)], upstream).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
