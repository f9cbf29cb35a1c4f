"""Embeddings that several workers train: step by step together, or at most some steps apart."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.jobs import worker_steps
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import SchedulerConfig
from tests.support.forkserver import FORKSERVER
from tests.support.rank_processes import run_ranks

STEPS, JOINT, ROWS = 6, 10, 30
SHARES = [slice(0, 7), slice(7, JOINT)]
MEMBERS = [
    gt.Field("user", dim=3, num_rows=ROWS),
    gt.Field("item", dim=4, pooling="mean", num_rows=ROWS),
    gt.Field("wide", dim=1, num_rows=ROWS, optimizer=gt.Adagrad(0.1)),
]


def group(cluster: Cluster, name: str = "ctr", where: Any = "pull", **settings: Any) -> gt.EmbeddingGroup:
    members = [*MEMBERS, gt.Field("seen", table="item", where=where)]
    return gt.EmbeddingGroup(cluster, name, members, optimizer=gt.SGD(0.5), **settings)


def batch_of(step: int, mine: slice) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (JOINT, 6), generator=rng)
    return {"user": ids[mine, 0], "item": ids[mine, :3], "seen": ids[mine, 3:5], "wide": ids[mine, 5]}


def losses_of(vectors: dict[str, torch.Tensor], step: int, mine: slice) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 + step)
    every = torch.cat([vectors[name] for name in ("user", "item", "seen", "wide")], dim=1)
    targets = torch.randn(JOINT, every.shape[1], generator=rng)[mine]
    return (every - targets.to(every)).square().sum(dim=1)


def train(fields: gt.EmbeddingGroup, mine: slice, clips: bool = True) -> float:
    rows, norm = gt.RowOptimizer(fields), 0.0
    for step in range(STEPS):
        for micro in (slice(mine.start, mine.start + 2), slice(mine.start + 2, mine.stop)):
            loss = losses_of(fields(batch_of(step, micro)), step, micro).sum() / JOINT
            (loss * len(SHARES)).backward()  # rows take the average over the ranks
        if clips:
            norm = float(rows.clip_grad_norm_(5.0))
        rows.step()
        rows.zero_grad()
    return norm


def all_rows(fields: gt.EmbeddingGroup) -> dict[str, np.ndarray]:
    return {name: fields.table(name).pull(np.arange(ROWS)) for name in ("user", "item", "wide")}


def train_a_rank(rank: int, folder: Path, address: str) -> None:
    with gt.connect(address) as cluster:
        fields = group(cluster, mode="sync")
        norm = train(fields, SHARES[rank])
        np.savez(folder / f"rank{rank}.npz", norm=norm, **all_rows(fields))  # at once: the step is everywhere
        hosted = group(cluster, "hosted", "hosted", mode="sync")
        train(hosted, SHARES[rank], clips=False)
        np.savez(folder / f"hosted{rank}.npz", **all_rows(hosted))


def reference_rows(name: str, *, clips: bool) -> dict[str, np.ndarray]:
    """One worker with the joint batch, in float64, by torch."""
    with gt.local() as cluster:
        rows = {key: torch.tensor(row).double() for key, row in all_rows(group(cluster, name)).items()}
    rows = {name: torch.nn.Parameter(row) for name, row in rows.items()}
    sgd = torch.optim.SGD([rows["user"], rows["item"]], lr=0.5)
    adagrad = torch.optim.Adagrad([rows["wide"]], lr=0.1)
    joint = slice(0, JOINT)
    for step in range(STEPS):
        batch = batch_of(step, joint)
        vectors = {
            "user": rows["user"][batch["user"]],
            "item": rows["item"][batch["item"]].mean(1),
            "seen": rows["item"][batch["seen"]].sum(1),
            "wide": rows["wide"][batch["wide"]],
        }
        losses_of(vectors, step, joint).mean().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(rows.values(), 5.0)
        for item in (sgd, adagrad):
            item.step()
            item.zero_grad()
    return {name: row.detach().numpy() for name, row in rows.items()}


def test_ranks_that_step_together_equal_one_worker_with_the_joint_batch(
    served: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(train_a_rank, 2, tmp_path, served(2).address)
    for file, group_name, clips in (("rank", "ctr", True), ("hosted", "hosted", False)):
        first, second = (np.load(tmp_path / f"{file}{rank}.npz") for rank in range(2))
        for name, expected in reference_rows(group_name, clips=clips).items():
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
            np.testing.assert_allclose(first[name], expected, rtol=2e-4, atol=2e-5, err_msg=f"{file} {name}")


def open_a_rank(rank: int, folder: Path, address: str) -> None:
    rule = gt.Unseen(steps=100, every=10)
    with gt.connect(address) as cluster:
        for day in range(2):
            members = [gt.Field("user", dim=3, expiry=rule), gt.Field("wide", dim=1, optimizer=gt.Adagrad(0.1))]
            reuse = day > 0 or rank > 0  # what rank 0 finds holds on all
            fields = gt.EmbeddingGroup(cluster, "m", members, optimizer=gt.SGD(0.5), mode="sync", reuse=reuse)
            begins = [part.row_update.step for part in fields.trained]
            rows = gt.RowOptimizer(fields)
            for _ in range(STEPS):
                fields({"user": [rank], "wide": [3]})["user"].sum().backward()
                rows.step()
                rows.zero_grad()
        (folder / f"rank{rank}").write_text(str(begins))


def test_ranks_that_step_together_all_begin_where_their_tables_are(served: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(open_a_rank, 2, tmp_path, served(2).address)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [f"[{STEPS}, 0]"] * 2


class Pauses:
    """Stands where a worker that waits sleeps: says that it does, and lets it go on when the test does."""

    def __init__(self) -> None:
        self.waits, self.may_ask = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        if seconds > 0:
            self.waits.release()
            assert self.may_ask.acquire(timeout=30)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pauses]:
    made = Pauses()
    monkeypatch.setattr(worker_steps, "time", SimpleNamespace(monotonic=time.monotonic, sleep=made))
    yield made
    for _ in range(1000):
        made.may_ask.release()


def one_step(fields: gt.EmbeddingGroup, rows: gt.RowOptimizer) -> None:
    fields({"user": [1], "item": [[1]], "seen": [[2]], "wide": [3]})["user"].sum().backward()
    rows.step()
    rows.zero_grad()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_waits_once_it_is_too_far_ahead_and_no_earlier(staleness: int, pauses: Pauses) -> None:
    with gt.local(num_shards=2) as cluster:
        fast, slow = (
            group(cluster, mode=gt.SSP(staleness, worker=name), reuse=name == "slow") for name in ("fast", "slow")
        )
        optimizers = [gt.RowOptimizer(item) for item in (fast, slow)]
        assert slow.worker_steps is not None and fast.worker_steps is not None
        slow.worker_steps.join()
        for _ in range(staleness):
            one_step(fast, optimizers[0])  # without any wait: no test would let it go on
        assert fast.worker_steps.ahead == staleness and not pauses.waits.acquire(blocking=False)

        ahead = threading.Thread(target=one_step, args=(fast, optimizers[0]))
        ahead.start()
        for _ in range(2):  # it asked, and waits on
            assert pauses.waits.acquire(timeout=30)
            pauses.may_ask.release()
        assert pauses.waits.acquire(timeout=30) and ahead.is_alive()
        with torch.no_grad():  # what it pushed is there meanwhile
            before = slow({"user": [1], "item": [[1]], "seen": [[2]], "wide": [3]})["user"]
        assert before.sum() < -1
        one_step(slow, optimizers[1])
        pauses.may_ask.release()
        ahead.join(30)
        assert not ahead.is_alive() and fast.worker_steps.done == staleness + 1


def test_a_stalled_worker_is_named_and_step_goes_on_waiting(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_steps, "_WARN_SECONDS", 1e-3)
    with gt.local() as cluster:
        fast = group(cluster, mode=gt.SSP(1, wait_seconds=0.05, worker="fast"))
        slow = group(cluster, mode=gt.SSP(1, worker="slow"), reuse=True)
        rows, slow_rows = gt.RowOptimizer(fast), gt.RowOptimizer(slow)
        one_step(slow, slow_rows)
        one_step(fast, rows)  # which has joined at 1
        names = r"worker 'fast' of job 'ctr' has done 3 steps and may be 1 ahead .*'slow' \(1 done, since 0 s\)"
        with pytest.raises(gt.errors.WorkerStalled, match=names):
            one_step(fast, rows)
        assert "'slow' (1 done" in caplog.text
        with pytest.raises(gt.errors.WorkerStalled):
            rows.step()
        one_step(slow, slow_rows)
        rows.step()
        assert fast.worker_steps is not None and fast.worker_steps.done == 3  # one step, however often it was called


def test_who_leaves_is_waited_for_no_more_and_joins_again_beside_the_others() -> None:
    with gt.local() as cluster:
        one = group(cluster, mode=gt.SSP(0, worker="one"))
        other = group(cluster, mode=gt.SSP(0, worker="other"), reuse=True)
        rows, other_rows = gt.RowOptimizer(one), gt.RowOptimizer(other)
        assert other.worker_steps is not None and one.worker_steps is not None
        other.worker_steps.join()
        other.worker_steps.leave()
        for _ in range(3):
            one_step(one, rows)
        other({"user": [1], "item": [[1]], "seen": [[2]], "wide": [3]})
        assert other.worker_steps.done == 3
        del other_rows


def a_worker_that_dies(address: str, joined: Any) -> None:
    with gt.connect(address) as cluster:
        fields = group(cluster, mode=gt.SSP(1, worker="dies"), reuse=True)
        one_step(fields, gt.RowOptimizer(fields))
        joined.set()
        signal.pause()


def test_a_worker_that_was_killed_holds_nobody_beyond_its_lease(served: Callable[..., Any], monkeypatch: Any) -> None:
    start = SchedulerServer.__init__

    def with_short_leases(self: SchedulerServer, config: SchedulerConfig) -> None:
        start(self, config.model_copy(update={"stream_lease_seconds": 1.0}))

    monkeypatch.setattr(SchedulerServer, "__init__", with_short_leases)
    joined = FORKSERVER.Event()
    address = served(1).address
    with gt.connect(address) as cluster:
        fields = group(cluster, mode=gt.SSP(1, worker="lives", wait_seconds=60))
        rows = gt.RowOptimizer(fields)
        process = FORKSERVER.Process(target=a_worker_that_dies, args=(address, joined), daemon=True)
        process.start()
        assert joined.wait(60)
        one_step(fields, rows)  # which has joined at 1
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for _ in range(3):  # waits for the lease, then for nobody
            one_step(fields, rows)
        assert fields.worker_steps is not None and fields.worker_steps.done == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_rows_are_those_of_the_shards(cluster: Cluster, dtype: Any) -> None:
    fields = gt.Embedding(cluster, "user", 16, optimizer=gt.Adam(0.1), dtype=dtype, device_cache_bytes=1 << 20)
    rows, rng = gt.RowOptimizer(fields), torch.Generator().manual_seed(1)
    for _ in range(8):
        ids = (torch.rand(1500, generator=rng) ** 2 * 2000).long()
        vectors = fields(ids)
        assert torch.equal(vectors, fields.table("user").pull(ids))
        (vectors * torch.randn(1500, 16, generator=rng)).sum().backward()
        rows.step()
    assert fields.cache["user"]["hit_rate"] > 0.6 and fields.cache["user"]["cleared"] == 0
