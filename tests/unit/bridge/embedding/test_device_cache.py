"""Embeddings with a device cache against the same ones without: the same vectors and rows, to the bit."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table, pull_together
from geartrain.ams.client.writes import RowWrite
from geartrain.ams.values.errors import InvalidArgument, Unavailable
from geartrain.bridge.placements.cached_rows import CachedRows

USERS, ITEMS = 80, 30
OF_TABLE = ("dtype", "slot_dtype", "admission", "expiry", "max_bytes")
ROOMY, TIGHT = 1 << 20, 1200


def group(cluster: Cluster, cache: int, **settings: Any) -> gt.EmbeddingGroup:
    user = {name: settings.pop(name) for name in list(settings) if name in OF_TABLE}
    fields = [
        gt.Field("user", dim=7, **user),
        gt.Field("item", dim=3, pooling="mean", num_rows=ITEMS, padding_id=0),
        gt.Field("seen", table="item", pooling=None),
        gt.Field(
            "shop", dim=7, dtype=user.get("dtype"), slot_dtype=user.get("slot_dtype")
        ),  # in one array with the users
    ]
    return gt.EmbeddingGroup(cluster, "ctr", fields, device_cache_bytes=cache, **settings)


class Script:
    """Batches and events, the same for equal seeds."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def batch(self) -> dict[str, Any]:
        lengths = self.rng.integers(0, 4, 12)
        seen = torch.from_numpy(self.rng.integers(0, ITEMS, int(lengths.sum())))
        return {
            "user": torch.from_numpy((self.rng.random(12) ** 3 * USERS).astype(np.int64)),
            "item": torch.from_numpy(self.rng.integers(0, ITEMS, (12, 2))),
            "shop": torch.from_numpy(self.rng.integers(0, ITEMS, 12)),
            "seen": (seen, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))),
        }

    def loss(self, vectors: dict[str, Tensor]) -> Tensor:
        values = (one.values() if one.is_nested else one for one in vectors.values())
        return torch.stack(
            [(one * torch.from_numpy(self.rng.standard_normal(one.shape)).float()).sum() for one in values]
        ).sum()


def plain(vectors: dict[str, Tensor]) -> list[Tensor]:
    return [(one.values() if one.is_nested else one).detach().clone() for one in vectors.values()]


def trained(cache: int, seed: int, events: Any = None, *, shards: int = 2, steps: int = 25, **settings: Any) -> Any:
    """Vectors of every step, the rows at last, and the report of the cache."""
    script, found = Script(seed), []
    with gt.local(num_shards=shards) as cluster:
        fields = group(cluster, cache, **settings)
        rows = gt.RowOptimizer(fields)
        for step in range(steps):
            vectors = fields(script.batch())
            found += plain(vectors)
            script.loss(vectors).backward()
            if step % 7 == 3:  # two micro-batches
                script.loss(fields(script.batch())).backward()
            rows.param_groups[0]["lr"] = 0.1 / (1 + step)
            if step % 9 != 8:  # else the step is skipped
                rows.step()
            rows.zero_grad()
            with torch.no_grad():
                found += plain(fields(script.batch()))
            if events is not None:
                events(cluster, fields, script, step)
        found += [
            torch.from_numpy(np.asarray(fields.table(name).pull(np.arange(ITEMS)), np.float32))
            for name in ("user", "item", "shop")
        ]
        return found, fields.cache


@functools.lru_cache(64)
def trained_without(seed: int, **settings: Any) -> Any:
    """What :func:`trained` finds without a cache."""
    return trained(0, seed, **settings)[0]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), number


FOLLOWED = [
    gt.SGD(0.1, weight_decay=0.01),
    gt.Momentum(0.1, 0.9),
    gt.Momentum(0.1, 0.9, nesterov=True),
    gt.Adagrad(0.1),
    gt.Adagrad(0.1, lr_decay=0.1),
    gt.Adam(0.01, weight_decay=0.1),
    gt.AdamW(0.01),
]
"""On devices, too."""
OPTIMIZERS = [*FOLLOWED, gt.RowWiseAdagrad(0.1), gt.FTRL(0.1)]
NARROW = ["bfloat16", "float16"]
"""By turns: one of them on the path of the host and the other on that of a device, for the next optimizer as well."""
BY_TURNS = list(enumerate(OPTIMIZERS))


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(optimizer, dtype) for number, optimizer in BY_TURNS for dtype in ("float32", NARROW[number % 2])],
    ids=str,
)
def test_training_with_a_cache_equals_training_without(optimizer: Any, dtype: str) -> None:
    found, report = trained(ROOMY, 1, optimizer=optimizer, dtype=dtype)
    assert_equal(found, trained_without(1, optimizer=optimizer, dtype=dtype))
    for counts in report.values():
        assert counts["hits"] > 0 and counts["cleared"] == 0
        assert counts["entries"] <= counts["capacity"] and counts["bytes"] <= ROOMY
        assert counts["hit_rate"] == counts["hits"] / (counts["hits"] + counts["misses"])
    # Every id is pulled once.
    assert report["user"]["misses"] <= USERS and report["item"]["misses"] <= ITEMS
    assert report["item"]["saved_bytes"] > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_so_it_does_where_few_rows_have_a_place(optimizer: Any) -> None:
    found, report = trained(TIGHT, 1, optimizer=optimizer, dtype="float32")
    assert_equal(found, trained_without(1, optimizer=optimizer, dtype="float32"))
    assert report["user"]["evicted"] > 0
    assert all(counts["entries"] <= counts["capacity"] and counts["bytes"] <= TIGHT for counts in report.values())


@pytest.mark.parametrize("slot_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("runs_on_host", [True, False])
def test_slots_of_16_bits_are_kept_to_the_bit(
    slot_dtype: str, runs_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"optimizer": gt.Momentum(0.1, 0.9), "dtype": "bfloat16", "slot_dtype": slot_dtype}
    without = trained_without(1, **settings)
    monkeypatch.setattr(CachedRows, "runs_on_host", property(lambda _: runs_on_host))
    found, report = trained(ROOMY, 1, **settings)
    assert_equal_but_for_order(found, without)
    assert report["user"]["misses"] <= USERS


def assigns(_: Cluster, fields: gt.EmbeddingGroup, script: Script, step: int) -> None:
    """Writes of this process, and of another client of the same cluster, beside the steps."""
    ids = script.rng.choice(ITEMS, 5, replace=False)
    values = script.rng.standard_normal((5, 7)).astype(np.float32)
    if step % 5 == 1:
        fields.table("user").assign(ids, values)
    if step % 5 == 2:
        fields.table("user").push(ids, values)
    if step % 5 == 3:
        fields.table("user").remove(ids)
    if step % 6 == 2:
        fields.table("item").push(ids, values[:, :3])


def others_train(cluster: Cluster, _: gt.EmbeddingGroup, script: Script, step: int) -> None:
    """Another worker in mode "async", without a cache."""
    if step % 4 == 1:
        other = group(cluster, 0, reuse=True)
        rows = gt.RowOptimizer(other)
        script.loss(other(script.batch())).backward()
        rows.step()


def expires(_: Cluster, fields: gt.EmbeddingGroup, __: Script, step: int) -> None:
    if step % 6 == 4:
        fields.table("user").expire(gt.Unseen(steps=2))


EVENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "writes beside the steps": (assigns, {}),
    "another worker": (others_train, {}),
    "expiry": (expires, {"expiry": gt.Unseen(steps=2)}),
    "a table that evicts": (None, {"max_bytes": 12_000}),
    "admission": (None, {"admission": gt.MinCount(3, max_bytes=1 << 16)}),
    "rows of 16 bits": (None, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_that_change_rows_are_seen(name: str) -> None:
    events, settings = EVENTS[name]
    without, _ = trained(0, 2, events, **settings)
    found, report = trained(ROOMY, 2, events, **settings)
    assert_equal(found, without)
    if name == "another worker":
        assert report["user"]["cleared"] > 0
    assert report["item"]["hits"] > 0


@pytest.mark.parametrize("mode", ["async", gt.SSP(3, worker="a")], ids=["async", "ssp"])
def test_a_restored_table_is_read_again(mode: Any, tmp_path: Path) -> None:
    with gt.local(num_shards=2) as cluster:
        fields = group(cluster, ROOMY, optimizer=gt.SGD(1.0), mode=mode)
        rows = gt.RowOptimizer(fields)
        batch = Script(3).batch()
        first = plain(fields(batch))
        taken = cluster.snapshot(tmp_path).result()
        for _ in range(2):
            sum(one.sum() for one in plain_with_gradient(fields, batch)).backward()
            rows.step()
            rows.zero_grad()
        assert not torch.equal(plain(fields(batch))[0], first[0])
        cluster.restore(taken, replace=True)
        assert_equal(plain(fields(batch)), first)


def plain_with_gradient(fields: gt.EmbeddingGroup, batch: Any) -> list[Tensor]:
    return [one.values() if one.is_nested else one for one in fields(batch).values()]


@pytest.mark.parametrize("then", ["step again", "look up, step again", "give up"])
def test_a_push_whose_reply_is_lost_leaves_no_wrong_row(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was applied, and the caller does not know."""
    found = {}
    for cache in (0, ROOMY):
        with gt.local(num_shards=2) as cluster, monkeypatch.context() as patch:
            fields = group(cluster, cache, optimizer=gt.Adagrad(0.5))
            rows = gt.RowOptimizer(fields)
            batch, script, vectors = Script(4).batch(), Script(5), []
            for step in range(6):
                script.loss(fields(batch)).backward()
                if step == 3:
                    send = RowWrite.send

                    def lose(self: RowWrite, send: Any = send) -> None:
                        send(self)
                        raise Unavailable("the reply was lost")

                    patch.setattr(RowWrite, "send", lose)
                    with pytest.raises(Unavailable):
                        rows.step()
                    patch.setattr(RowWrite, "send", send)
                    if then == "look up, step again":
                        with torch.no_grad():
                            vectors += plain(fields(batch))
                    if then == "give up":
                        rows.zero_grad()
                        continue
                rows.step()
                rows.zero_grad()
                vectors += plain(fields(batch))
            found[cache] = vectors
    assert_equal(found[ROOMY], found[0])


@pytest.mark.parametrize("fails", ["update", "read"])
@pytest.mark.parametrize("mode", ["async", gt.SSP(3, worker="a")], ids=["async", "ssp"])
def test_a_cache_that_finds_no_memory_has_no_wrong_row_and_pushes_nothing_twice(
    fails: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, fail = torch.arange(8), Mock(side_effect=MemoryError)
    settings: Any = {"optimizer": gt.SGD(1.0), "initializer": gt.Constant(0.5), "device_cache_bytes": 1 << 12}
    with gt.local(num_shards=2) as cluster:
        fields = gt.Embedding(cluster, "t", 2, mode=mode, **settings)
        rows = gt.RowOptimizer(fields)
        for step in range(3):
            fields(ids[:4]).sum().backward()
            with monkeypatch.context() as patch:
                if step == 1:
                    patch.setattr(CachedRows, fails, fail)
                    with pytest.raises(MemoryError):
                        rows.step() if fails == "update" else fields(ids[2:])
            rows.step()  # of what is still pending
            rows.zero_grad()
        wanted = 4 * [[-2.5, -2.5]] + 4 * [[0.5, 0.5]]
        assert fields.table("t").pull(ids.numpy()).tolist() == fields(ids).tolist() == wanted


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_lost_reply_leaves_no_wrong_row_under_ssp(looks_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted there: a row that was pulled after the push must not be moved by it once more."""
    ids, send = torch.tensor([7, 8]), RowWrite.send

    def lose(self: RowWrite) -> None:
        send(self)
        raise Unavailable("the reply was lost")

    with gt.local(num_shards=2) as cluster:
        mode, settings = gt.SSP(3, worker="a"), {"optimizer": gt.SGD(1.0), "initializer": gt.Constant(0.0)}
        fields = gt.Embedding(cluster, "t", 1, mode=mode, device_cache_bytes=1 << 12, **settings)
        rows = gt.RowOptimizer(fields)
        for step in range(4):
            (-fields(ids).sum()).backward()
            if step == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(RowWrite, "send", lose)
                    with pytest.raises(Unavailable):
                        rows.step()
                if looks_up:
                    fields(ids)
            rows.step()
            rows.zero_grad()
        assert fields(ids).flatten().tolist() == [4, 4]
        assert fields.cache["t"]["hits"] > 0


def test_a_write_that_a_look_up_of_new_ids_tells_of_drops_rows() -> None:
    """Nothing was found that it could be wrong for."""
    with gt.local() as cluster:
        fields = gt.Embedding(cluster, "t", 2, optimizer=gt.SGD(1.0), device_cache_bytes=1 << 12)
        fields(torch.tensor([1]))
        fields.table("t").assign(np.array([1]), np.full((1, 2), 9.0, np.float32))
        fields(torch.tensor([2]))
        assert fields(torch.tensor([1])).tolist() == [[9.0, 9.0]]


def two_workers(cluster: Cluster, staleness: int) -> list[gt.Embedding]:
    settings: Any = {"optimizer": gt.SGD(1.0), "initializer": gt.Constant(0.0), "device_cache_bytes": 1 << 12}
    workers = [
        gt.Embedding(cluster, "t", 1, mode=gt.SSP(staleness, worker=name), reuse=name == "b", **settings)
        for name in "ab"
    ]
    for worker in workers:
        worker.worker_steps.join()  # type: ignore[union-attr]
    return workers


@pytest.mark.parametrize("staleness", [0, 3])
def test_rows_are_as_old_as_ssp_allows_and_no_older(staleness: int) -> None:
    """Every step of each of two workers adds 1 to a row, so that the row says how many steps are in it."""
    steps, ids = 30, torch.tensor([7, 8])
    with gt.local(num_shards=2) as cluster:
        workers = two_workers(cluster, staleness)

        def train(worker: gt.Embedding) -> None:
            rows = gt.RowOptimizer(worker)
            for done in range(steps):
                vectors = worker(ids)
                assert done + max(0, done - staleness) <= float(vectors[0].detach()) <= 2 * done + staleness + 1
                (-vectors.sum()).backward()
                rows.step()
                rows.zero_grad()
            worker.worker_steps.leave()  # type: ignore[union-attr]

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(train, workers))
        with torch.no_grad():
            assert float(workers[0](ids)[0]) == 2 * steps
        assert staleness > 0 or all(worker.cache["t"]["hits"] == 0 for worker in workers)


def test_a_worker_finds_what_ssp_lets_it_keep() -> None:
    """Both are of one process, so that a push of one drops the rows of the other at once."""
    with gt.local(num_shards=2) as cluster:
        workers = two_workers(cluster, 3)
        optimizers = [gt.RowOptimizer(worker) for worker in workers]
        for _ in range(10):
            for worker, rows in zip(workers, optimizers, strict=True):
                for _ in range(2):  # two steps while the other makes none: the second finds its rows here
                    worker(torch.tensor([7, 8])).sum().backward()
                    rows.step()
                    rows.zero_grad()
        assert [worker.cache["t"]["hit_rate"] for worker in workers] == [0.5, 0.5]


def test_a_program_of_ones_own_tells_prometheus_of_hits_and_how_far_ahead_it_is() -> None:
    pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")
    from tests.support.scrapes import scrape

    with gt.local() as cluster, gt.ops.serve_metrics("127.0.0.1:0") as port:
        settings: Any = {"optimizer": gt.SGD(1.0), "device_cache_bytes": 1 << 12}
        fields = gt.Embedding(cluster, "told", 1, mode=gt.SSP(3, worker="a"), **settings)
        other = cluster.job_steps("told", worker="b")
        other.join()
        rows = gt.RowOptimizer(fields)
        for _ in range(3):
            fields(torch.tensor([7, 8])).sum().backward()
            rows.step()
            rows.zero_grad()
        told = scrape(port.address)
        assert told.value("geartrain_cache_hits_total", cache="told", holds="rows") == fields.cache["told"]["hits"] == 4
        assert told.value("geartrain_cache_misses_total", cache="told", holds="rows") == 2
        assert told.value("geartrain_worker_steps_ahead", worker="a") == 3
        assert told.value("geartrain_worker_wait_seconds_total", worker="a") == 0


def test_what_is_told_of_writes_does_not_pile_up() -> None:
    """A prefetched batch is pulled past the caches."""
    script = Script(7)
    with gt.local(num_shards=2) as cluster:
        fields = group(cluster, ROOMY, mode=gt.SSP(2, worker="a"))
        rows = gt.RowOptimizer(fields)
        for _, vectors in gt.prefetch([script.batch() for _ in range(6)], fields):
            script.loss(vectors).backward()
            rows.step()
            rows.zero_grad()
        own: Any = fields.rows
        assert [len(cache._reader.entries) for cache in own._caches.values()] == [0, 0, 0]


def assert_equal_but_for_order(found: list[Tensor], without: list[Tensor]) -> None:
    """Rows to the bit, pooled vectors to rounding."""
    for number, (a, b) in enumerate(zip(found, without, strict=True)):
        if number % 4 in (0, 3) or number >= len(found) - 3:  # users and shops, which are not pooled; the rows at last
            assert torch.equal(a, b), number
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "cache"),
    [
        (optimizer, dtype, cache)
        for number, optimizer in BY_TURNS
        for dtype, cache in ((NARROW[1 - number % 2], ROOMY), ("float32", TIGHT))
    ],
    ids=str,
)
def test_the_path_of_a_device_equals_that_of_the_host(
    optimizer: Any, dtype: str, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tensor operations, here on a CPU."""
    without = trained_without(1, optimizer=optimizer, dtype=dtype)
    monkeypatch.setattr(CachedRows, "runs_on_host", property(lambda _: False))
    found, report = trained(cache, 1, optimizer=optimizer, dtype=dtype)
    assert_equal_but_for_order(found, without)
    if cache == ROOMY and optimizer in FOLLOWED:
        assert report["user"]["misses"] <= USERS and report["item"]["misses"] <= ITEMS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache": 16}, "give more"),
        ({"cache": -1}, "device_cache_bytes"),
        ({"cache": ROOMY, "optimizer": gt.SparseMomentum(0.1, 0.9, untouched="elapsed")}, "move at steps"),
    ],
)
def test_what_cannot_be_cached_is_refused(settings: dict[str, Any], words: str) -> None:
    with gt.local() as cluster, pytest.raises(InvalidArgument, match=words):
        group(cluster, settings.pop("cache"), **settings)


def test_a_shard_that_has_no_states_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an earlier release takes the width of a state for a wrong one, as this one does another width."""
    monkeypatch.setattr(Table, "state_width", property(lambda table: table.spec.dim + 99))
    with gt.local(num_shards=2) as cluster:
        fields = group(cluster, ROOMY)
        with pytest.raises(InvalidArgument, match="update them, or leave device_cache_bytes out"):
            fields(Script(8).batch())


def test_a_state_is_a_row_with_all_that_a_push_goes_by() -> None:
    with gt.local(num_shards=2) as cluster:
        table = cluster.create_table("t", dim=3, optimizer=gt.Adam(0.1))
        ids = np.arange(6)
        table.push(ids[:4], np.ones((4, 3), np.float32))
        table.push(ids[:2], np.ones((2, 3), np.float32))
        assert table.state_width == 3 + 6 + 2
        states, rows = np.zeros((6, table.state_width), np.float32), np.zeros((6, 3), np.float32)
        one, other = pull_together([(table, ids, states), (table, ids, rows)])
        assert one == other
        np.testing.assert_array_equal(states[:, :3], rows)
        np.testing.assert_allclose(states[:4, 3:6], [[0.19] * 3] * 2 + [[0.1] * 3] * 2, rtol=1e-5)
        assert np.ascontiguousarray(states[:, 9:11]).view(np.int64)[:, 0].tolist() == [2, 2, 1, 1, -1, -1]
        for bad in (states.astype(np.float64), np.asfortranarray(states)):
            with pytest.raises(ValueError, match=r"dim|float32"):
                pull_together([(table, ids, bad)])
