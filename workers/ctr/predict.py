"""Prediction of clicks by a run of ``geartrain worker ctr``, from the rows of its best snapshot, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import ColumnMismatch, ConfigError
from geartrain.workers.atomic import replacing
from geartrain.workers.ctr.batches import AT_ONCE, ClickBatch, batches_of
from geartrain.workers.ctr.designs import Design, SampleLayout
from geartrain.workers.ctr.samples.click_samples import ClickSamples, histories_after, split
from geartrain.workers.ctr.samples.sources import load_samples, own_samples
from geartrain.workers.ctr.trainer import ClickTrainer, scored
from geartrain.workers.data.packages import Say
from geartrain.workers.job.folder import read_run, warn_if_unended
from geartrain.workers.job.state import JobState, best_snapshot
from geartrain.workers.samples.files import require_arrow


def is_click_run(folder: Path) -> bool:
    """Return whether ``folder`` holds a run of a click model."""
    return job_of_rows(folder) == ClickTrainer.job


def job_of_rows(folder: Path) -> str | None:
    """Return the kind of job that took the newest snapshot of the run in ``folder``; None: there is no snapshot."""
    try:
        listed = list_snapshots(read_run(folder).snapshots)
    except ConfigError:
        return None
    snapshot = next((entry.snapshot for entry in listed if entry.snapshot is not None), None)
    return None if snapshot is None else str(snapshot.manifest.job.get("job"))


def predict_clicks(run: Path, samples: str, *, cache: Path, say: Say) -> npt.NDArray[np.float64]:
    """Return the probability of a click [N] of each sample in the files of ``samples``, in their order.

    The files have the columns of the run's training samples; ``click`` is ignored. One part of them at a time is in
    memory. A model with histories that are no columns reads the run's own samples, too, and then all are in memory: a
    history has what a user did among the training samples before ``time``, or all of it if there is no such column.

    Raises ConfigError; SnapshotDamaged; SourceError naming a missing column, or a line of CSV whose value is of another
    kind than in training; InvalidArgument for such a value elsewhere.
    """
    snapshot = best_snapshot(read_run(run).snapshots)
    say(f"The model of {run} is that of step {snapshot.manifest.step}")
    warn_if_unended(run, snapshot.manifest.step, say)
    state = JobState.read(snapshot, ClickTrainer.job, ClickTrainer.recipe_class)
    design = Design(state.recipe, SampleLayout.from_json(state.data))
    kinds = design.layout.schema.kinds
    batches: Iterable[ClickBatch]
    if state.recipe.reads_events or any(len(feature.of) > 1 for feature in design.features):
        given = _with_fields_of(
            design, own_samples(samples, clicks=False, kinds=kinds, files=state.recipe.files), samples
        )
        if state.recipe.reads_events:
            given = _with_histories(
                design, given, load_samples(state.data["source"], cache, say, kinds, files=state.recipe.files)
            )
        batches = batches_of(design, given)
    else:
        batches = _streamed(design, samples)
    with local(num_shards=1) as cluster:
        cluster.restore(snapshot.path)
        network = design.network()
        fields = design.fields(cluster, state.progress.table, reuse=True, per_node=network.per_node)
        network.load_state_dict(state.tensors["network"])
        scores = scored(network, fields, batches)[0]
    if not len(scores):
        say(f"{samples} holds no samples: there is nothing to score")
    return scores


def _streamed(design: Design, place: str) -> Iterator[ClickBatch]:
    require_arrow()
    from geartrain.workers.ctr.samples.own import OwnSamples

    samples = OwnSamples(place, clicks=False, times=False, kinds=design.layout.schema.kinds, files=design.recipe.files)
    for part, count in enumerate(samples.part_rows):
        rows = samples.read(part)
        for first in range(0, count, AT_ONCE):
            batch = rows.slice(first, AT_ONCE).batch({})
            yield ClickBatch(design.ids_of(batch), {}, torch.zeros(batch.num_samples))


def _with_fields_of(design: Design, given: ClickSamples, path: str) -> ClickSamples:
    fields: Mapping[str, npt.NDArray[np.int64]] = given.fields
    if missing := [name for name in design.layout.fields if name not in fields]:
        raise ColumnMismatch(
            f"{path} has no column {missing[0]!r}, which the model was trained on; it has "
            f"{', '.join(map(repr, fields)) or 'none'}"
        )
    return replace(given, fields={name: fields[name] for name in design.layout.fields}, schema=design.layout.schema)


def _with_histories(design: Design, given: ClickSamples, of_run: ClickSamples) -> ClickSamples:
    """Add histories to the given samples from those of the run: the training samples; all if histories are fresh."""
    recipe, past = design.recipe, of_run
    if not recipe.fresh:
        past, _ = split(of_run, recipe.split, recipe.seed, validation=recipe.validation)
    return replace(given, histories=histories_after(past, given, recipe.history), images=of_run.images)


def write_scores(path: Path, scores: npt.NDArray[np.float64]) -> None:
    """Write a Parquet file with the column ``score``, all or nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(pa.table({"score": scores}), temporary)
