"""Steps of modules whose rows or weights are elsewhere: embeddings, dense tables, slow gears."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.bridge.kernels.hashing import HashTable
from geartrain.bridge.placements import device_lookup
from geartrain.bridge.rows.transfers import Readback
from tests.recorder.dry_ranks import dry_ranks
from tests.recorder.report import Report


@contextlib.contextmanager
def embedding(
    report: Report,
    fields: int = 26,
    batch: int = 1024,
    bag: int = 1,
    dim: int = 16,
    ids: str = "cuda",
    rows: str = "pull",
    ranks: int = 1,
    num_rows: int = 100_000,
    optimizer: str = "Adagrad",
    dtype: str = "float32",
    device_cache_bytes: int = 0,
    is_ahead: bool = False,
    grows: bool = False,
) -> Iterator[Callable[[], None]]:
    """``gt.EmbeddingGroup`` with a table for each of ``fields``, ``bag`` ids a bag; ``ids`` are on "cpu" or "cuda".
    Every one of ``ranks`` has as many rows of each vector. With ``is_ahead`` a batch is taken apart a step before it is
    looked up, as ``gt.prefetch`` does. With ``grows`` tables on ranks have ids without a bound, and room for
    ``num_rows``.
    """
    shape = (batch,) if bag == 1 else (batch, bag)
    names = [f"f{number}" for number in range(fields)]
    on_ranks = rows == "ranks"
    more: dict[str, Any] = {"num_rows": num_rows} if on_ranks and not grows else {}
    more["dtype"] = dtype
    settings: dict[str, Any] = {"rows": rows, "device_cache_bytes": device_cache_bytes}

    class Starts(Readback):
        """How many ids go where."""

        def values(self) -> Tensor:
            host, share = super().values(), min(1.0, bag / ranks)
            each = torch.tensor([[batch * bag / ranks], [batch * share]], device="cpu")
            return host.copy_(torch.arange(host.shape[1], device="cpu") * each)

    with contextlib.ExitStack() as stack:
        stack.enter_context(dry_ranks(ranks, report))
        stack.enter_context(mock.patch.object(device_lookup, "Readback", Starts))
        cluster = None if on_ranks else stack.enter_context(gt.local(num_shards=2))
        made = [gt.Field(name, dim=dim, **more) for name in names]
        module = gt.EmbeddingGroup(cluster, "t", made, optimizer=getattr(gt, optimizer)(0.05), **settings).to("cuda")
        train = gt.RowOptimizer(module)
        seed = np.random.default_rng(0)
        for name in names if grows else ():
            module.table(name).reserve(num_rows)

        def some() -> Tensor:
            if ids == "cuda":
                return torch.empty(shape, dtype=torch.int64, device="cuda")
            return torch.from_numpy(seed.integers(0, num_rows, shape))

        waiting: list[Any] = []

        def step() -> None:
            given = {name: some() for name in names}
            report.reset()
            if is_ahead:
                waiting.append(module.merged(given))
            if len(waiting) == 1:  # the first step
                return
            vectors = module.vectors_of(waiting.pop(0)) if is_ahead else module(given)
            torch.cat(list(vectors.values()), 1).sum().backward()
            train.step()
            train.zero_grad()

        yield step


@contextlib.contextmanager
def hashing(report: Report, num_ids: int = 1_050_000, num_slots: int = 10_000_000) -> Iterator[Callable[[], None]]:
    """The slots of ``num_ids`` ids, some of them new, in a table that has room for them."""
    table = HashTable(num_slots, torch.device("cuda"))

    def step() -> None:
        ids_N = torch.empty(num_ids, dtype=torch.int64, device="cuda")
        report.reset()
        table.reserve(num_ids)
        table.find_or_insert(ids_N)

    yield step


@contextlib.contextmanager
def dense(report: Report, width: int = 300, batch: int = 32) -> Iterator[Callable[[], None]]:
    """A module on the device whose weights are in a dense table (``gt.attach``)."""
    with gt.local(num_shards=2) as cluster:
        with torch.device("cuda"):
            network = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5))
        table = gt.attach(network, cluster, name="net", optimizer=gt.Momentum(0.05), dim=128)

        def step() -> None:
            samples = torch.empty(batch, 20, device="cuda")
            network(samples).square().mean().backward()
            report.reset()
            table.step()
            table.zero_grad()

        yield step


@contextlib.contextmanager
def gear(
    report: Report, ids: str = "cuda", batch: int = 64, dim: int = 16, expire_seconds: float = 0.0
) -> Iterator[Callable[[], None]]:
    """``gt.SlowGear`` with its slow gear in this process, on the device; every feature is computed in every step."""
    samples = torch.randn(1000, 20)

    def build() -> nn.Module:
        with torch.device("cuda"):
            return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, dim))

    with gt.local(num_shards=2) as cluster:
        module = gt.SlowGear(
            cluster,
            "image",
            dim=dim,
            build=build,
            samples=samples,
            expire_seconds=expire_seconds,
            gradients_per_id=1,
            mode="sync",
        )
        train = gt.RowOptimizer(module)
        seed = np.random.default_rng(0)

        def step() -> None:
            given = torch.from_numpy(seed.integers(0, len(samples), batch))
            if ids == "cuda":
                given = torch.empty(batch, dtype=torch.int64, device="cuda")
            report.reset()
            module(given).square().mean().backward()
            train.step()
            train.zero_grad()

        yield step
        module.close()
