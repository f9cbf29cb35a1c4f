"""``gt.prefetch``: batches with their vectors; ids are merged and rows pulled while earlier steps are computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.embedding.lookups import BatchRows, pull, pull_again
from geartrain.bridge.pipeline.background_pushes import BackgroundPushes
from geartrain.bridge.pipeline.stages import Pipeline, Stage, StageTime, close, now

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.rows.write_log import WriteLog, WriteReader
    from geartrain.ams.client.table import Table
    from geartrain.bridge.rows.pending import PendingUpdate

Work = Callable[[Any], Any]
_FORGOTTEN_SECONDS = 5.0
"""Longest wait for each thread of a run that is not referenced any more. The garbage collector ends such a run anywhere
in a program, also where it holds a lock that the thread needs."""


def prefetch(
    loader: Iterable[Any],
    fields: EmbeddingGroup | Sequence[EmbeddingGroup],
    *,
    depth: int = 2,
    staleness: int = 0,
    stages: Sequence[Work | tuple[Work, int]] = (),
    pull_threads: int = 1,
) -> Prefetch:
    """Read batches, merge their ids and pull their rows while earlier steps are computed.

        for batch, vectors in gt.prefetch(loader, fields):     # for batch in loader: vectors = fields(batch)
            loss = criterion(model(vectors), batch["click"])
            loss.backward(); optimizer.step(); rows.step()

    Each stage has one or several threads: the loader has one, then come the functions of ``stages``, and the merge of
    ids and pull. Batches keep their order. The loop's body runs in the caller's thread. With ``staleness=0`` a run
    equals the plain loop bit by bit: before vectors are returned, the rows that this process has written since their
    pull, and only those, are pulled again. An error of a stage is raised where the plain loop would raise it, after the
    batches before it; it ends the iteration, as do ``break``, Ctrl-C and garbage collection: threads end after their
    current item, and a generator is closed.

    Args:
        loader: Yields batches: a torch ``DataLoader`` or any iterable, iterated anew by each ``for``. Each batch must
            have its own memory, as later ones are read while it is used.
        fields: The group to look up, or several groups, of one cluster or of several. A :class:`gt.Embedding` finds its
            ids in the batch under its name.
        depth: Most batches that a stage is ahead of the next one, >= 1; each further thread of it adds one.
        staleness: Most steps of this process whose pushes the rows may lack, >= 0. Pushes of other workers are included
            up to the pull. Groups of mode "sync" or SSP are pulled when their vectors are returned or, above 0, at most
            so many steps of this process earlier. Above 0, pushes are sent in the background: the next step or batch
            raises their error; a group's look-ups, ``gt.save``, snapshots and the end of the loop wait for them.
        stages: Functions batch -> batch between the loader and the lookup, in order. ``(function, 4)`` is called by 4
            threads at a time, which pays where it waits or releases the GIL, as decoding and numpy do.
        pull_threads: Most batches whose ids are merged and rows pulled at a time, >= 1. More than one pays where shards
            are other processes or machines.

    Returns:
        An iterable of (batch, vectors), with the loader's ``len()``. Vectors are what ``fields(batch)`` returns; for
        several groups a tuple. ``torch.no_grad()`` around the loop applies to them, too.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    return Prefetch(loader, fields, depth=depth, staleness=staleness, stages=stages, pull_threads=pull_threads)


class Prefetch:
    """Iterable of :func:`prefetch`. Each ``iter()`` is a separate run over the loader."""

    def __init__(
        self,
        loader: Iterable[Any],
        fields: EmbeddingGroup | Sequence[EmbeddingGroup],
        *,
        depth: int,
        staleness: int,
        stages: Sequence[Work | tuple[Work, int]],
        pull_threads: int,
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise InvalidArgument(f"the loader is {quoted(loader)}; it must be an iterable of batches")
        self._is_one = isinstance(fields, EmbeddingGroup)
        is_several = isinstance(fields, Sequence) and not self._is_one
        self._groups: tuple[EmbeddingGroup, ...] = tuple(fields) if is_several else (fields,)  # type: ignore[arg-type,assignment]
        for group in self._groups:
            if not isinstance(group, EmbeddingGroup):
                raise InvalidArgument(f"fields are {quoted(group)}; they must be a gt.EmbeddingGroup, or several")
        self._loader = loader
        self._stages = [_stage(stage) for stage in stages]
        self._pull_threads = integer("pull_threads", pull_threads, 1)
        self._depth = integer("depth", depth, 1)
        self._staleness = integer("staleness", staleness, 0)
        works = [stage.work for stage in self._stages]
        names = [f"{n}: {getattr(work, '__name__', type(work).__name__)}" for n, work in enumerate(works, 1)]
        self.times = {name: StageTime() for name in ("read", *names, "pull", "hand out", "loop")}
        """Time of each stage, over all runs: "hand out" pulls rows again and pools, "loop" is the body."""
        self.refreshed_rows = 0
        """Number of rows that were pulled again, over all runs."""

    def __iter__(self) -> PrefetchRun:
        return PrefetchRun(self)

    @property
    def updates(self) -> list[PendingUpdate[Any]]:
        """Pending updates of all groups."""
        return [part.row_update for group in self._groups for part in group.trained]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class _Ready(NamedTuple):
    """Batch with its pulled rows."""

    batch: Any
    pulled: Sequence[BatchRows]
    marks: Mapping[WriteLog, int]
    """Position in each write log at the time of the pull."""


class PrefetchRun(Iterator[tuple[Any, Any]]):
    """Run over a loader. ``close()`` ends it, as does garbage collection."""

    def __init__(self, of: Prefetch) -> None:
        self._of = of
        self._readers = {
            log: log.reader() for log in {log: None for group in of._groups for log in group.rows.write_logs}
        }
        self._pushes: BackgroundPushes | None = None
        pull_stage = Stage(_puller(of._groups, self._readers, of._staleness), of._pull_threads)
        names = [f"prefetch-{name}" for name in list(of.times)[:-2]]
        self._pipeline = Pipeline(names, of._depth, [*of._stages, pull_stage])
        self._end = weakref.finalize(self, _stop, self._pipeline, None, _FORGOTTEN_SECONDS)
        self._has_started = False
        self._is_closed = False
        self._handed_out_at: tuple[float, float] | None = None

    def __next__(self) -> tuple[Any, Any]:
        if self._handed_out_at is not None:
            self._of.times["loop"].count(self._handed_out_at)
            self._handed_out_at = None
        if self._is_closed:
            raise StopIteration
        try:
            if not self._has_started:
                self._start()
            handed_out = self._hand_out(self._pipeline.next())
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self._stop()
            raise
        self._handed_out_at = now()
        return handed_out

    def close(self) -> None:
        """End the run: stop the threads after their current items, waiting pushes included. Idempotent.

        Raises an error of a background push that was not raised before.
        """
        self._stop()
        if self._pushes is not None:
            self._pushes.wait()

    def _stop(self) -> None:
        self._is_closed = True
        self._end.detach()
        _stop(self._pipeline, self._pushes)
        self._readers.clear()
        for update in self._of.updates:
            if self._pushes is not None and update.background is self._pushes and self._pushes.is_clean:
                update.background = None

    def _start(self) -> None:
        self._has_started = True
        of, times = self._of, list(self._of.times.values())
        items = iter(of._loader)
        try:
            # In this thread, as in a plain loop: a loader draws its shuffling seed from torch's generator.
            begun = now()
            first = next(items)
            for group in of._groups:
                group.rows.join()
            self._push_later()
            times[0].count(begun)
            self._pipeline.start(first, items, times[:-2])
        except BaseException:
            if not self._pipeline.has_started:
                close(items)
            raise

    def _push_later(self) -> None:
        """Send the pushes of steps in the background from now on, if ``staleness`` allows rows to lack some."""
        groups = [group for group in self._of._groups if group.rows.pushes_rows_alone and not group.rows.is_bounded]
        if not self._of._staleness or not groups:
            return
        for update in self._of.updates:
            if update.background is not None:
                update.background.wait()  # of an earlier run
                update.background.raise_or_retry()
        self._pushes = pushes = BackgroundPushes()
        self._end.detach()
        self._end = weakref.finalize(self, _stop, self._pipeline, pushes, _FORGOTTEN_SECONDS)
        for group in groups:
            cast("Cluster", group.cluster).wait_for(pushes)
            for part in group.trained:
                part.row_update.background = pushes

    def _hand_out(self, ready: _Ready) -> tuple[Any, Any]:
        begun = now()
        missing = self._of._staleness
        for update in self._of.updates:  # an evaluation within a training run waits for that run's pushes
            if update.background is not None:
                update.background.wait(missing)
        for group in self._of._groups:
            group.rows.join()
        touched = {log: reader.touched(ready.marks[log], missing=missing) for log, reader in self._readers.items()}

        def touched_ids(table: Table) -> Sequence[Any]:
            return touched[table.write_log].get(table.spec.name, ())

        self._of.refreshed_rows += pull_again(ready.pulled, touched_ids)
        for log, reader in self._readers.items():
            reader.forget(ready.marks[log])
        groups = self._of._groups
        vectors = tuple(group.vectors_of(pulled) for group, pulled in zip(groups, ready.pulled, strict=True))
        self._of.times["hand out"].count(begun)
        return ready.batch, vectors[0] if self._of._is_one else vectors


def _stop(pipeline: Pipeline, pushes: BackgroundPushes | None, timeout_seconds: float | None = None) -> None:
    pipeline.stop(timeout_seconds)
    if pushes is not None:
        pushes.close(timeout_seconds)


def _stage(given: Any) -> Stage:
    stage = Stage(*given) if isinstance(given, tuple) and len(given) == 2 else Stage(given)
    if not callable(stage.work):
        raise InvalidArgument(
            f"a stage is {quoted(given)}; it must be a function batch -> batch, or (function, number of threads)"
        )
    return Stage(stage.work, integer("the number of threads of a stage", stage.num_threads, 1))


def _puller(groups: Sequence[EmbeddingGroup], readers: Mapping[WriteLog, WriteReader], staleness: int) -> Work:
    """Return the stage that merges ids and pulls rows."""
    readers = dict(readers)

    def pull_rows(batch: Any) -> _Ready:
        pulled = [group.merged(batch) for group in groups]
        marks = {log: reader.mark() for log, reader in readers.items()}
        pull(item for item in pulled if staleness or not item.is_bounded)  # bounded ones would all be pulled again
        return _Ready(batch, pulled, marks)

    return pull_rows
