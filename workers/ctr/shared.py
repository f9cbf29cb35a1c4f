"""Batches whose data streams several workers share: each leases some, and commits its progress.

After a loss in a cluster, the scheduler restores the job, tables and cursors together, from its last snapshot.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.data_streams import DataStreams
from geartrain.ams.client.jobs.worker_steps import worker_name
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import Busy, SchedulerUnavailable, SnapshotFailed, StaleClient
from geartrain.ams.values.scheduler_messages import RestoreOrder
from geartrain.workers.ctr.batches import BatchesInMemory, ClickBatch, ClickBatches
from geartrain.workers.ctr.designs import Design
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.samples.topic import TopicSamples
from geartrain.workers.ctr.streamed import StreamedBatches, click_batch
from geartrain.workers.ctr.topic import late_labels
from geartrain.workers.data.streams import NUM_STREAMS
from geartrain.workers.job.options import ENDLESS
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.leased import BusyWait, LeasedSamples
from geartrain.workers.samples.order import EpochOrder
from geartrain.workers.samples.reader import FileBatches, StreamBatches
from geartrain.workers.samples.rows import SampleNumbers
from geartrain.workers.samples.source import fingerprint

_POLL_SECONDS = 0.2
_QUIET_SECONDS = 1.5
"""Time without a reader after which workers that end with the first one have seen that it has ended its stage."""


class SharedBatches(ClickBatches):
    """This worker's share of the samples of a job. A batch costs an RPC to the scheduler."""

    def __init__(
        self,
        reader: Callable[[], StreamBatches],
        num_streams: int,
        identity: str,
        recipe: CtrRecipe,
        design: Design,
        cluster: Cluster,
        job: str,
        restore: RestoreOrder | None,
    ) -> None:
        self.identity = identity
        self._design, self._negatives = design, recipe.negatives
        self._make_reader, self._num_streams, self._restore = reader, num_streams, restore
        self._is_restored, self._cluster, self._job = restore is not None, cluster, job
        self._next: SampleBatch | None = None
        self._cursors: Mapping[int, tuple[int, int]] = {}
        """Cursors that :meth:`where` returned last."""
        self._open()

    def _open(self) -> None:
        streams = self._cluster.streams(
            self._job,
            worker=worker_name(self._job, None),
            num_streams=self._num_streams,
            data=self.identity,
            restore=self._restore,
        )
        self._reader = self._make_reader()
        self._leased = LeasedSamples(self._reader, streams)

    def is_ready(self) -> bool:
        if self._next is None and self._leased.has_more:
            self._next = self._leased.next_batch()
        return self._next is not None

    def has_ended(self) -> bool:
        return not self._leased.has_more

    def trained(self, step: int) -> ClickBatch:
        """Return the next batch, for any ``step``."""
        del step
        batch, self._next = self._next, None
        assert batch is not None  # is_ready was True
        return self._click_batch(batch)

    def _click_batch(self, batch: SampleBatch) -> ClickBatch:
        return click_batch(self._design, batch, self._negatives)

    def apply(self, step: Callable[[], object]) -> bool:
        batch = self._next
        assert batch is not None  # is_ready was True
        if self._is_restored:
            try:
                return self._leased.apply(batch, step)
            finally:
                self._next = None
        step()
        self._leased.commit(batch)
        return True

    def go_on(self, cursors: Mapping[int, tuple[int, int]]) -> None:
        self._leased.restore(cursors)

    def where(self) -> Mapping[int, tuple[int, int]]:
        """Return the cursors behind all samples that the job's workers have committed."""
        self._cursors = self._leased.cursors()
        return self._cursors

    def kept(self, batches: Iterable[ClickBatch]) -> Iterator[ClickBatch]:
        """Pass ``batches`` on, and keep the lease meanwhile."""
        for batch in batches:
            yield batch
            self.keep_lease()

    def alone(self) -> AbstractContextManager[None]:
        """Pause the other workers, by an RPC to the scheduler."""
        return self._leased.alone()

    def require_alone(self) -> None:
        self._leased.require_alone()
        if (self.has_ended() and self._are_read()) or self._leased.cursors() != self._cursors:
            raise SnapshotFailed(f"another worker has trained on samples of job {self._job!r} meanwhile; take it again")

    def keep_lease(self) -> None:
        self._leased.keep()

    @property
    def has_others(self) -> bool:
        try:
            return self._streams().has_others()
        except SchedulerUnavailable:
            return True

    def settle(self) -> bool:
        self.close()
        return is_kept(self._cluster, self._job)

    def reopen(self) -> bool:
        if not self.settle():
            return False
        self._next = None
        self._open()
        return True

    def wait_alone(self) -> None:
        quiet_seconds = 0.0 if self.has_ended() else _QUIET_SECONDS
        self.close()
        last_read = time.monotonic()
        while (is_read := self._are_read()) or time.monotonic() - last_read < quiet_seconds:
            if is_read:
                last_read = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _are_read(self) -> bool:
        """Return whether any worker holds streams of the job."""
        return any(self._streams().holders().holders)

    def _streams(self) -> DataStreams:
        """Return the streams of the job to look at."""
        return self._cluster.streams(self._job, worker=worker_name(self._job, None), num_streams=1)

    def close(self) -> None:
        with suppress(StaleClient):  # the job went back: others have the streams
            self._leased.close()


class SharedFiles(SharedBatches):
    """Samples of files, in whole epochs."""

    def __init__(self, samples: OwnSamples, recipe: CtrRecipe, design: Design, *of_job: Any) -> None:
        self._files = files = StreamedBatches(samples, recipe, design)
        self.num_trained, self.num_validated, self.num_tested = files.num_trained, files.num_validated, files.num_tested
        order = EpochOrder(files.part_rows, seed=recipe.seed, num_streams=NUM_STREAMS, window_rows=recipe.window_rows)
        epochs = math.ceil(recipe.epochs)
        reader = partial(FileBatches, files, order, batch_size=recipe.batch_size, drop_last=False, epochs=epochs)
        super().__init__(reader, NUM_STREAMS, files.identity, recipe, design, *of_job)

    def some(self) -> ClickSamples:
        return self._files.some()

    def validated(self) -> Iterator[ClickBatch]:
        return self._files.validated()

    def tested(self) -> Iterator[ClickBatch]:
        return self._files.tested()


class SharedInMemory(SharedBatches):
    """Samples that each worker has in memory, with the histories that are made of all of them; workers share their
    numbers.
    """

    def __init__(self, samples: ClickSamples, recipe: CtrRecipe, design: Design, *of_job: Any) -> None:
        self._whole = whole = BatchesInMemory(samples, recipe, design)
        self.num_trained, self.num_validated, self.num_tested = whole.num_trained, whole.num_validated, whole.num_tested
        identity = fingerprint(recipe.split, recipe.seed, whole.num_trained, zlib.crc32(whole.some().clicks.tobytes()))
        numbers = SampleNumbers(np.random.default_rng(recipe.seed).permutation(whole.num_trained))
        order = EpochOrder(numbers.part_rows, seed=recipe.seed, num_streams=NUM_STREAMS, window_rows=recipe.window_rows)
        epochs = math.ceil(recipe.epochs)
        reader = partial(FileBatches, numbers, order, batch_size=recipe.batch_size, drop_last=False, epochs=epochs)
        super().__init__(reader, NUM_STREAMS, identity, recipe, design, *of_job)

    def _click_batch(self, batch: SampleBatch) -> ClickBatch:
        numbers = batch["number"]
        assert isinstance(numbers, Tensor) and batch.places is not None
        streams, positions = batch.places  # other ones in each epoch
        return self._whole.numbered(numbers.numpy(), positions * NUM_STREAMS + streams)

    def some(self) -> ClickSamples:
        return self._whole.some()

    def validated(self) -> Iterator[ClickBatch]:
        return self._whole.validated()

    def tested(self) -> Iterator[ClickBatch]:
        return self._whole.tested()


class SharedTopic(SharedBatches):
    """Messages of a topic; each worker has some of its partitions."""

    num_trained = ENDLESS << 22

    def __init__(self, samples: TopicSamples, recipe: CtrRecipe, design: Design, *of_job: Any) -> None:
        self._samples, messages = samples, samples.messages
        self.ends = messages.ends
        super().__init__(messages.unassigned, messages.num_partitions, messages.identity, recipe, design, *of_job)

    def some(self) -> ClickSamples:
        return self._samples.none()

    def told(self) -> dict[str, Any]:
        """Return what the report says about the messages that this worker has read."""
        return late_labels(self._reader)


def is_kept(cluster: Cluster, job: str) -> bool:
    """Return whether the scheduler restores the job after a loss; wait while it saves or restores it."""
    worker, backoff = worker_name(job, None), Backoff(ClientConfig().recovery_timeout_seconds)
    busy = BusyWait()
    while True:
        try:
            num_streams = len(cluster.streams(job, worker=worker, num_streams=1).cursors())
            if not num_streams:
                return False
            streams = cluster.streams(job, worker=worker, num_streams=num_streams)
            lease = streams.lease()
            with suppress(StaleClient):  # it goes back: look again
                streams.release()
                return bool(lease.tables)
        except Busy as exc:
            busy.log(exc)
            time.sleep(_POLL_SECONDS)
        except SchedulerUnavailable:
            if not backoff.pause():
                raise
