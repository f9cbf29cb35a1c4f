"""Samples in Parquet and CSV files, as a user creates them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from geartrain.ams.values.arguments import boolean, integer
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.data.streams import NUM_STREAMS
from geartrain.workers.samples.order import EpochOrder
from geartrain.workers.samples.source import SampleSource, fingerprint

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.values.scheduler_messages import RestoreOrder
    from geartrain.workers.samples.batches import SampleBatch
    from geartrain.workers.samples.late_labels import LateLabels
    from geartrain.workers.samples.leased import LeasedSamples
    from geartrain.workers.samples.reader import StreamBatches
    from geartrain.workers.samples.urls import Sources


class FileSamples(IterableDataset["SampleBatch"]):
    """Samples in rows of files: base of :class:`ParquetSamples` and :class:`CsvSamples`.

    An ``IterableDataset`` of batches: ``DataLoader(samples, batch_size=None, num_workers=4)``. The workers of a
    DataLoader and the ranks of torch.distributed read a part each, so that every sample comes once an epoch.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        batch_size: int,
        seed: int | None,
        window_rows: int,
        drop_last: bool,
        finish: Callable[[SampleBatch], SampleBatch],
        late_labels: LateLabels | None = None,
    ) -> None:
        self._source, self._finish = source, finish
        self._batch_size = integer("batch_size", batch_size, 1)
        self._drop_last = boolean("drop_last", drop_last)
        self._seed = None if seed is None else integer("seed", seed, 0, 2**63 - 1)
        self._window_rows, self._late_labels = integer("window_rows", window_rows, 1), late_labels
        if late_labels is not None and seed is not None:
            raise InvalidArgument(f"seed is {seed}, and labels that come late need rows in their order; leave it out")
        self._epoch, self._consumed = 0, 0
        self._part: tuple[int, int] | None = None
        """Part set by :meth:`part`."""
        self._consumed_of: tuple[int, int] | None = None
        """Part of :attr:`_consumed`."""
        self._iterations = 0
        """Number of iterations begun: the last one decides where the next one starts."""
        self._fingerprint = fingerprint(source.identity, list(source.part_rows), self._seed, self._window_rows)

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch."""
        return sum(self._source.part_rows)

    def part(self, number: int, of: int) -> None:
        """Read only part ``number`` of ``of`` parts, equal to within a batch, from now on; default: that of this rank.

        ``part(0, 1)`` reads all on every rank, such as for a validation. Another part than before is read from the
        start of the epoch. Raises InvalidArgument.
        """
        before, self._part = self._part_of_rank(), (integer("number", number, 0, integer("of", of, 1) - 1), of)
        if self._part != before:
            self._consumed = 0
            self._iterations += 1  # a running one is of the old part

    def set_epoch(self, epoch: int) -> None:
        """Read epoch ``epoch``, from 0, next. Required for a DataLoader whose workers end with an epoch."""
        self._epoch, self._consumed = integer("epoch", epoch, 0), 0

    def __getstate__(self) -> dict[str, Any]:
        # a spawned worker has no ranks; without ranks here, a spawned process may become one
        return {**self.__dict__, "_part": self._part_of_rank() if _has_ranks() else self._part}

    def _part_of_rank(self) -> tuple[int, int]:
        if self._part is not None:
            return self._part
        return (dist.get_rank(), dist.get_world_size()) if _has_ranks() else (0, 1)

    def _part_of_process(self) -> tuple[int, int]:
        (number, of), info = self._part_of_rank(), get_worker_info()
        return (number, of) if info is None else (number * info.num_workers + info.id, of * info.num_workers)

    def __len__(self) -> int:
        """Return the batches of an epoch that this rank reads."""
        number, of = self._part_of_rank()
        whole, rest = divmod(self._order(of, self._batch_size).stream_rows(number), self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[SampleBatch]:
        """Read an epoch, or the rest of it; the next iteration reads the next one. Raises SourceError, and
        InvalidArgument for the rest of another part.

        Batches that ``gt.prefetch`` has read ahead when its loop ends early are read by the next iteration.
        """
        part = self._part_of_process()
        if self._consumed and self._consumed_of not in (None, part):
            raise InvalidArgument(
                f"{self._consumed} samples of epoch {self._epoch} were read as part {_spelled(self._consumed_of)}, and "
                f"this process reads part {_spelled(part)}: their rests differ. Begin an epoch by "
                f"set_epoch({self._epoch}), or read all of it by torchdata's StatefulDataLoader, whose workers go on "
                "where they were"
            )
        self._iterations += 1
        reader = self._reader(self._order(part[1], self._batch_size))
        return _Epoch(self, self._iterations, reader, part, (self._epoch, self._consumed))

    def _record(self, iteration: int, part: tuple[int, int], place: tuple[int, int]) -> None:
        if iteration == self._iterations:
            (self._epoch, self._consumed), self._consumed_of = place, part

    def state_dict(self, batch: SampleBatch | None = None) -> dict[str, Any]:
        """Return the position as plain values: after ``batch``, or after the last one that was handed out.

        It is that of this process's part. Raises InvalidArgument for a batch of another one, such as a DataLoader
        worker's: torchdata's StatefulDataLoader asks each worker for its own.
        """
        part = self._part_of_process()
        if batch is not None and batch.part != part:
            raise InvalidArgument(
                "the batch was read by another process, such as a DataLoader's worker; take torchdata's "
                "StatefulDataLoader, whose state has that of each worker, or num_workers=0"
            )
        epoch, consumed = (self._epoch, self._consumed) if batch is None else batch.cursors[part[0]]
        return {"data": self._fingerprint, "epoch": epoch, "consumed": consumed, **self._part_as_json()}

    def _part_as_json(self) -> dict[str, Any]:
        number, of = self._part_of_process()
        return {} if of == 1 else {"part": {"number": number, "of": of, "batch_size": self._batch_size}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same samples; the batch size may differ. Raises ConfigError."""
        if state.get("data") != self._fingerprint:
            raise ConfigError(
                "the state was made for other samples: files, seed or window_rows differ. Bring the old ones back, or "
                "start anew"
            )
        if state.get("part") != (own := self._part_as_json().get("part")):
            raise ConfigError(
                f"the state is that of the part {state.get('part') or 'of all samples'}, and this process reads "
                f"{own or 'all samples'}: give as many ranks and workers as then and the same batch_size, or begin an "
                "epoch by set_epoch"
            )
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed"])
        self._consumed_of = self._part_of_process()

    def shared(
        self,
        cluster: Cluster,
        job: str,
        *,
        worker: str,
        epochs: int | None = 1,
        num_workers: int = 1,
        num_streams: int = NUM_STREAMS,
        incarnation: int | None = None,
        restore: RestoreOrder | None = None,
    ) -> LeasedSamples:
        """Read a part of the samples, beside other workers of a job; every one of an epoch is committed exactly once.

        Args:
            cluster: Its scheduler stores the job's cursors.
            job: Name of the job; the workers of a job read the same files with the same settings.
            worker: Name of this worker, unique in the job.
            epochs: Epochs of the job, in all; None: endless.
            num_workers: Expected workers: samples are reserved for them for one lease after the first.
            num_streams: Parts of the samples, and so the most workers.
            incarnation: As in ``Cluster.streams``.
            restore: The scheduler saves the job and restores it after a loss: train with
                :meth:`.LeasedSamples.apply`.

        Raises InvalidArgument.
        """
        from geartrain.workers.samples.leased import LeasedSamples

        streams = cluster.streams(
            job,
            worker=worker,
            num_streams=num_streams,
            num_workers=num_workers,
            incarnation=incarnation,
            data=self._fingerprint,
            restore=restore,
        )
        if epochs is not None:
            integer("epochs", epochs, 1)
        return LeasedSamples(self._reader(self._order(num_streams), epochs), streams)

    def _order(self, num_streams: int, unit_rows: int = 1) -> EpochOrder:
        return EpochOrder(
            self._source.part_rows,
            seed=self._seed,
            num_streams=num_streams,
            window_rows=self._window_rows,
            unit_rows=unit_rows,
        )

    def _reader(self, order: EpochOrder, epochs: int | None = None) -> Any:
        from geartrain.workers.samples.reader import FileBatches

        size, labels = self._batch_size, self._late_labels
        settings: dict[str, Any] = {"batch_size": size, "epochs": epochs}
        if labels is None:
            return FileBatches(self._source, order, drop_last=self._drop_last, finish=self._finish, **settings)
        from geartrain.workers.samples.late_labels import LabelledBatches

        reader = FileBatches(self._source, order, drop_last=False, **settings)
        return LabelledBatches(reader, labels, batch_size=size, finish=self._finish)


class _Epoch(Iterator["SampleBatch"]):
    """Batches of the rest of an epoch."""

    def __init__(
        self,
        samples: FileSamples,
        number: int,
        reader: StreamBatches,
        part: tuple[int, int],
        place: tuple[int, int],
    ) -> None:
        """``number`` of the iteration, which reads a ``part`` from ``place`` on."""
        self._samples, self._number, self._reader, self._epoch = samples, number, reader, place[0]
        self._part, stream = part, part[0]
        self._places = [place]
        """Positions before the first batch, and after each."""
        self._is_ended = False
        reader.add({stream: place})

    def __next__(self) -> SampleBatch:
        if self._is_ended:
            raise StopIteration
        batch = self._reader.next_batch(self._epoch)
        if batch is None:
            self._samples._record(self._number, self._part, (self._epoch + 1, 0))
            self.close()
            raise StopIteration
        batch.part = self._part
        self._places.append(batch.cursors[self._part[0]])
        self._samples._record(self._number, self._part, self._places[-1])
        return batch

    def give_back(self, count: int) -> None:
        """Return the last ``count`` batches, which were not used: the next iteration starts with them."""
        self._samples._record(self._number, self._part, self._places[-1 - count])

    def close(self) -> None:
        """Close the open files. Idempotent."""
        self._is_ended = True
        self._reader.close()


class ParquetSamples(FileSamples):
    """Samples in rows of Parquet files, in batches.

        samples = gt.ParquetSamples("clicks/", columns=["user", "item", "history", "click"], batch_size=4096, seed=0)
        for batch in samples:            # one epoch; batch["user"] [B], batch["history"] (values, offsets)
            vectors = fields(batch)

    Integers are int64, lists ``(values, offsets)``, lists of L values [B, L]. :meth:`shared` reads beside other
    workers. Memory: two row groups with the columns that are read, and a window.
    """

    def __init__(
        self,
        where: Sources,
        *,
        batch_size: int,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        hash_strings: bool | Sequence[str] | Mapping[str, int] = False,
        fill: Mapping[str, float | str] | None = None,
        fold: Sequence[str] = (),
        seed: int | None = None,
        window_rows: int = 65_536,
        drop_last: bool = False,
        dedup: bool | Mapping[str, Sequence[str]] = False,
        late_labels: LateLabels | None = None,
    ) -> None:
        """Find the files and read their footers.

        Args:
            where: A file, a folder (all ``.parquet`` and ``.pq`` below it), a pattern with ``*``, any URL that fsspec
                knows, or a list of them.
            batch_size: B, also across files.
            columns: Columns to read; None: all. A mapping also has their types: "int64", "float32", "float64", "bool",
                "string", "list<int64>", "int64[8]"; otherwise they are those of the first file with a value.
            hash_strings: Columns of strings, or of lists of them, to hash to ids with ``gt.hash_strings``; True: all. A
                mapping gives each its seed.
            fill: Replacement of missing values, by column, also if a file lacks the column. A missing list is empty;
                without ``fill``, a missing text is empty, and another missing value an error.
            fold: Columns of any 64-bit integers, or of lists of them, such as signed hashes, to map to ids with
                ``gt.fold_ids``; a missing one is the value of ``fill``, which is not folded.
            seed: Shuffles row groups anew in each epoch, and rows within a window; None: all in order.
            window_rows: Rows that are shuffled together.
            drop_last: Skip the last batch of an epoch if it is not full.
            dedup: Levels and their columns, as ``{"user": ["user", "history"]}``: samples of a batch that are equal in
                all of them share a node, whose ids are looked up and pooled once. True: every column of lists is a
                level by itself.
            late_labels: Rows are impressions and their clicks, in the order of their times (:class:`gt.LateLabels`).
                Without ``seed``.

        Raises:
            ConfigError: pyarrow is missing.
            InvalidArgument: An argument is out of range.
            SourceNotFound: There are no such files.
            ColumnMismatch: A column is missing, or of another type: names column, file and both types.
            SourceDamaged: A file is cut off.
        """
        require_arrow()
        from geartrain.workers.samples.dedup import finisher
        from geartrain.workers.samples.parquet import ParquetRows

        source = ParquetRows(where, trees=False).plan(columns, hash_strings, fill or {}, fold)
        self.types = source.types
        super().__init__(
            source,
            batch_size=batch_size,
            seed=seed,
            window_rows=window_rows,
            drop_last=drop_last,
            finish=finisher(dedup),
            late_labels=late_labels,
        )


class CsvSamples(FileSamples):
    """Samples in lines of CSV files, in batches; otherwise as :class:`ParquetSamples`.

        samples = gt.CsvSamples("clicks.csv", columns={"user": "int64", "tags": "list<string>", "click": "float32"},
                                hash_strings=["tags"], batch_size=4096)

    A row is a line: quoted values hold no line breaks. Opening reads every file once, to count the lines; Parquet is
    read many times as fast.
    """

    def __init__(
        self,
        where: Sources,
        *,
        batch_size: int,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        hash_strings: bool | Sequence[str] | Mapping[str, int] = False,
        fill: Mapping[str, float | str] | None = None,
        fold: Sequence[str] = (),
        seed: int | None = None,
        window_rows: int = 65_536,
        drop_last: bool = False,
        delimiter: str = ",",
        list_delimiter: str = "|",
        names: Sequence[str] | None = None,
        block_bytes: int = 4 << 20,
        dedup: bool | Mapping[str, Sequence[str]] = False,
        late_labels: LateLabels | None = None,
    ) -> None:
        """Find the files and count their lines. Other arguments and errors are those of :class:`ParquetSamples`.

        Args:
            where: As there; of a folder, all ``.csv`` and ``.tsv``.
            batch_size: B.
            columns: As there; unstated types are guessed from the first lines.
            hash_strings: As there.
            fill: As there; an empty value is missing, for numbers NA as well.
            fold: As there.
            seed: As there; it shuffles blocks of lines.
            window_rows: As there.
            drop_last: As there.
            delimiter: Text between values; default for ``.tsv``: tab.
            list_delimiter: Text between the values of a list, in a column of a list type.
            names: Names of the columns; None: the first line has them.
            block_bytes: Bytes of lines that are read at once.
            dedup: As there.
            late_labels: As there.
        """
        require_arrow()
        from geartrain.workers.samples.csv_lines import CsvRows
        from geartrain.workers.samples.dedup import finisher

        source = CsvRows(
            where,
            delimiter=delimiter,
            list_delimiter=list_delimiter,
            names=names,
            block_bytes=block_bytes,
        ).plan(columns, hash_strings, fill or {}, fold)
        super().__init__(
            source,
            batch_size=batch_size,
            seed=seed,
            window_rows=window_rows,
            drop_last=drop_last,
            finish=finisher(dedup),
            late_labels=late_labels,
        )


class TreeSamples(FileSamples):
    """Samples in prefix trees, made by ``geartrain samples compress`` (:func:`compress_samples`), in batches.

        samples = gt.TreeSamples("clicks-trees/", batch_size=4096, seed=0)
        for batch in samples:
            batch["user"]            # [N]: an id for each of the N users in the batch
            batch.index["user"]      # [B]: which of them a sample has
            vectors = fields(batch)  # looked up and pooled once a user, then given to each sample

    Batches have B samples; larger trees are split. ``seed`` shuffles trees as units. :meth:`shared` reads beside other
    workers.
    """

    def __init__(
        self,
        where: Sources,
        *,
        batch_size: int,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        hash_strings: bool | Sequence[str] | Mapping[str, int] = False,
        fill: Mapping[str, float | str] | None = None,
        fold: Sequence[str] = (),
        seed: int | None = None,
        window_rows: int = 65_536,
        drop_last: bool = False,
    ) -> None:
        """Find the files and read their footers. Arguments and errors as of :class:`ParquetSamples`.

        Args:
            where: As there.
            batch_size: B.
            columns: As there; None: all of the trees.
            hash_strings: As there.
            fill: As there.
            fold: As there.
            seed: As there; trees are shuffled as units.
            window_rows: As there.
            drop_last: As there.
        """
        require_arrow()
        from geartrain.workers.samples.dedup import unchanged
        from geartrain.workers.samples.parquet import ParquetRows

        source = ParquetRows(where, trees=True).plan(columns, hash_strings, fill or {}, fold)
        self.levels = source.levels
        super().__init__(
            source,
            batch_size=batch_size,
            seed=seed,
            window_rows=window_rows,
            drop_last=drop_last,
            finish=unchanged,
        )


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _spelled(part: tuple[int, int] | None) -> str:
    return "" if part is None else f"{part[0]} of {part[1]}"


def require_arrow() -> None:
    """Raise ConfigError, with the remedy, unless pyarrow can be imported."""
    try:
        importlib.import_module("pyarrow")
    except ImportError as exc:
        raise ConfigError(
            f"samples from files need pyarrow, which cannot be imported: {exc}; pip install 'geartrain[data]'"
        ) from exc
