"""Workers that share the samples of a job: whoever is killed, and however many there are, each sample counts once."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values.config import SchedulerConfig, ServerConfig
from tests.support.forkserver import FORKSERVER

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

from sample_reader import read  # noqa: E402

COUNT = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, ids in enumerate(np.array_split(np.arange(COUNT), 5)):
        pq.write_table(pa.table({"id": ids}), folder / f"{number}.parquet", row_group_size=90)
    return folder


@pytest.fixture
def address() -> Iterator[str]:
    with ExitStack() as stack:
        config = SchedulerConfig(listen="127.0.0.1:0", num_shards=1, stream_lease_seconds=1.5)
        scheduler = SchedulerServer(config)
        stack.callback(scheduler.stop, 0)
        address = scheduler.start()
        shard = ShardServer(ServerConfig(scheduler=address, shard=0, heartbeat_seconds=0.05))
        stack.callback(shard.stop, 0)
        shard.start()
        yield address


@pytest.fixture
def start(address: str, data: Path, tmp_path: Path) -> Iterator[Callable[..., ForkServerProcess]]:
    running: list[ForkServerProcess] = []

    def start(worker: str, workers: int, die_at: int = 0, moment: str = "") -> ForkServerProcess:
        log = tmp_path / f"{len(running)}-{worker}.log"
        running.append(FORKSERVER.Process(target=read, args=(address, data, log, worker, workers, die_at, moment)))
        running[-1].start()
        return running[-1]

    yield start
    for item in running:
        item.kill()
        item.join()


def ended(process: ForkServerProcess) -> int | None:
    process.join(60)
    return process.exitcode


def committed(log: Path) -> tuple[list[int], list[int]]:
    """The ids that a process knows were committed, and those of a batch of which it does not know."""
    sure: list[int] = []
    open_: list[int] = []
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if "read" in entry:
            open_ = entry["read"]
        else:
            sure += open_
            open_ = []
    return sure, open_


def test_killed_workers_and_another_number_of_them_commit_every_sample_once(
    start: Callable[..., ForkServerProcess], tmp_path: Path
) -> None:
    first, second, third = start("a", 3, 3, "before"), start("b", 3, 5, "after"), start("c", 3)
    assert (ended(first), ended(second)) == (-9, -9)
    fourth, fifth = start("a", 3), start("d", 3)  # one takes its place, one is new
    third.kill()  # wherever it is
    assert (ended(fourth), ended(fifth)) == (0, 0)
    counts: Counter[int] = Counter()
    logs = sorted(tmp_path.glob("*.log"))
    unknown = []
    for log in logs:
        sure, rest = committed(log)
        counts.update(sure)
        if log.name == "1-b.log":
            counts.update(rest)  # it died after the commit was acknowledged
        elif log.name == "2-c.log":
            unknown = rest
    missing = {item: 2 - counts[item] for item in range(COUNT) if counts[item] != 2}
    # Of the batch that a kill from outside met, nobody but the scheduler knows: it counts as a whole or not at all.
    assert missing in ({}, dict(Counter(unknown)))


def test_a_worker_joins_and_leaves_in_the_middle(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=50, seed=1)
    with gt.local() as cluster:
        counts: Counter[int] = Counter()
        first = samples.shared(cluster, "job", worker="first", epochs=2, num_streams=8)
        read = [next(first) for _ in range(3)]  # a pipeline reads ahead
        for batch in read:
            counts.update(batch["id"].tolist())
            first.commit(batch)
        second = samples.shared(cluster, "job", worker="second", epochs=2, num_streams=8)
        ends = threading.Thread(target=lambda: [work(second, counts)])
        ends.start()
        work(first, counts, 20)
        first.close()
        ends.join(60)
        assert counts == Counter(dict.fromkeys(range(COUNT), 2))
        late = samples.shared(cluster, "job", worker="late", epochs=2, num_streams=8)
        assert list(late) == []


def work(batches: Any, counts: Counter[int], most: int = 10**9) -> None:
    for number, batch in enumerate(batches):
        batches.commit(batch)
        counts.update(batch["id"].tolist())
        if number == most:
            return


def test_what_was_not_committed_is_read_again(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=500)
    with gt.local() as cluster:
        with samples.shared(cluster, "job", worker="a") as batches:
            first, second, third = (next(batches) for _ in range(3))
            batches.commit(second)
            batches.commit(first)  # is in it
        with pytest.raises(gt.errors.StaleClient, match="lost its lease, or by another reader"):
            batches.commit(third)
        with samples.shared(cluster, "job", worker="b") as batches:
            assert next(batches)["id"].tolist() == third["id"].tolist() == list(range(1000, 1500))


def test_a_stream_that_others_lack_is_kept_until_what_was_read_of_it_is_committed(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=1000)
    with gt.local() as cluster:
        first = samples.shared(cluster, "job", worker="a", num_streams=2)
        read = [next(first), next(first)]  # the second one is of both streams, of 1,500 samples each
        cluster.streams("job", worker="b", num_streams=2).lease()
        first.commit(read[0])  # is told that b lacks a stream
        third = next(first)
        first.commit(read[1])
        first.commit(third)
        assert list(first) == []
        cursors = cluster.streams("job", worker="b", num_streams=2).cursors()
        assert sum(len(batch["id"]) for batch in (*read, third)) == COUNT and set(cursors.values()) == {(1, 0)}


def test_after_a_file_that_cannot_be_read_the_loop_goes_on_where_it_was(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=700)
    path = data / "1.parquet"
    whole = path.read_bytes()
    with gt.local() as cluster, samples.shared(cluster, "job", worker="a") as batches:
        path.write_bytes(whole[:-9])
        with pytest.raises(gt.errors.SourceDamaged, match=r"1.parquet has changed"):
            next(batches)  # 600 samples of the file before were taken by then
        path.write_bytes(whole)
        ids = []
        for batch in batches:
            ids += batch["id"].tolist()
            batches.commit(batch)
    assert ids == list(range(COUNT))


def test_a_loop_that_never_commits_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=500)
    with gt.local() as cluster:
        batches = samples.shared(cluster, "job", worker="a")
        read = [next(batches)]
        monkeypatch.setattr(batches, "_lease_seconds", 0.3)
        with pytest.raises(gt.errors.InvalidArgument, match=r"6 batches not committed; call commit\(batch\)"):
            read.extend(batches)
        assert len(read) == 6


def test_a_dropped_rest_is_committed_with_its_epoch(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=400, drop_last=True)
    with gt.local() as cluster:
        counts: Counter[int] = Counter()
        with samples.shared(cluster, "job", worker="a", epochs=2) as batches:
            work(batches, counts)
        assert counts == Counter(dict.fromkeys(range(2800), 2))
        assert set(cluster.streams("job", worker="b").cursors().values()) == {(2, 0)}


def test_a_worker_with_another_order_or_other_files_is_refused(data: Path) -> None:
    with gt.local() as cluster:
        with gt.ParquetSamples(data, batch_size=500, seed=1).shared(cluster, "job", worker="a") as batches:
            next(batches)
        other = gt.ParquetSamples(data, batch_size=500, seed=2).shared(cluster, "job", worker="b")
        with pytest.raises(
            gt.errors.InvalidArgument, match=r"worker 'b' reads data .* all workers of a job read the same"
        ):
            next(other)
        assert next(gt.ParquetSamples(data, batch_size=9, seed=1).shared(cluster, "job", worker="b")).num_samples == 9


def test_more_streams_than_samples(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "a.parquet")
    samples = gt.ParquetSamples(tmp_path, batch_size=2)
    with gt.local() as cluster, samples.shared(cluster, "job", worker="a", epochs=2) as batches:
        counts: Counter[int] = Counter()
        work(batches, counts)
    assert counts == {1: 2, 2: 2, 3: 2}


def prefetched(data: Path, cluster: Cluster, *, stop_at: int) -> tuple[Any, Counter[int]]:
    """Train from samples that a pipeline reads ahead, to the end or until a step fails."""
    fields = gt.EmbeddingGroup(cluster, f"ctr{stop_at}", [gt.Field("id", dim=1)], optimizer=gt.SGD(1.0))
    batches = gt.ParquetSamples(data, columns=["id"], batch_size=500).shared(
        cluster, f"job{stop_at}", worker="a", epochs=2
    )
    counts: Counter[int] = Counter()
    loop = gt.prefetch(batches, fields, depth=3, stages=[(lambda batch: batch, 2)], pull_threads=2)
    for number, (batch, vectors) in enumerate(loop):
        assert len(vectors["id"]) == batch.num_samples
        if number == stop_at:
            raise ZeroDivisionError
        batches.commit(batch)
        counts.update(batch["id"].tolist())
    return batches, counts


@pytest.mark.timeout(30)
def test_a_pipeline_reads_ahead_over_epochs_and_ends_with_an_error_of_the_loop(data: Path) -> None:
    with gt.local() as cluster:
        _, counts = prefetched(data, cluster, stop_at=10**9)
        assert counts == Counter(dict.fromkeys(range(COUNT), 2))
        with pytest.raises(ZeroDivisionError):  # while the reader waits for the commits of its epoch
            prefetched(data, cluster, stop_at=5)
    assert not [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_a_second_reader_of_a_workers_name_takes_the_place_of_the_first(data: Path) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=300)
    with gt.local() as cluster:
        first, second = (samples.shared(cluster, "job", worker="a") for _ in range(2))
        counts: Counter[int] = Counter()
        batch = next(first)
        first.commit(batch)
        counts.update(batch["id"].tolist())
        late = next(first)
        batch = next(second)
        with pytest.raises(gt.errors.StaleClient, match="worker 'a' of job 'job' was opened a second time"):
            first.commit(late)
        with pytest.raises(gt.errors.StaleClient, match="give each reader a worker name of its own"):
            next(first)
        second.commit(batch)
        counts.update(batch["id"].tolist())
        work(second, counts)
        assert counts == Counter(range(COUNT))


def test_a_loop_that_leaves_the_last_batches_uncommitted_is_told_and_goes_on(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=300)
    with gt.local() as cluster:
        batches = samples.shared(cluster, "job", worker="a", epochs=2)
        counts: Counter[int] = Counter()
        read: list[Any] = []

        def every_third() -> None:
            for batch in batches:
                monkeypatch.setattr(batches, "_lease_seconds", 0.3)
                read.append(batch)
                if len(read) % 3 == 0:
                    batches.commit(batch)

        for epoch in (1, 2):
            with pytest.raises(gt.errors.InvalidArgument, match=r"batch(es)? not committed.*the last one of an epoch"):
                every_third()
            assert len(read) == 10 * epoch
            batches.commit(read[-1])
        assert list(batches) == []
        counts.update(item for batch in read for item in batch["id"].tolist())
        assert counts == Counter(dict.fromkeys(range(COUNT), 2))


def test_a_wait_for_the_commits_of_another_thread_is_told_of(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=1500)
    with gt.local() as cluster:
        batches = samples.shared(cluster, "job", worker="a", epochs=2)
        first, second = next(batches), next(batches)
        committer = threading.Thread(target=batches.commit, args=(first,))
        committer.start()
        committer.join(30)
        monkeypatch.setattr(batches, "_lease_seconds", 0.3)
        is_told = threading.Event()

        handler = logging.NullHandler()
        monkeypatch.setattr(handler, "handle", lambda _: is_told.set())
        log = logging.getLogger("geartrain.workers.samples.leased")
        log.addHandler(handler)
        late = threading.Thread(target=lambda: is_told.wait(30) and batches.commit(second))
        late.start()
        try:
            assert next(batches).num_samples == 1500  # of the second epoch
        finally:
            log.removeHandler(handler)
            late.join(30)
        assert "job 'job': the next epoch waits for the commits of 1 batch" in caplog.text
