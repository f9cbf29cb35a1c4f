"""Batches that workers of a job share: what the others do, and which samples each epoch keeps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geartrain.ams.values.errors import SchedulerUnavailable, SnapshotFailed

pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")

from geartrain.workers.ctr import shared
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import ClickSamples, SampleSchema
from geartrain.workers.ctr.shared import SharedBatches, SharedInMemory
from geartrain.workers.data.streams import NUM_STREAMS

FREE, HELD = (None, None), (None, "other")


def cluster_of(replies: Iterable[Any], cursors: Iterable[Any] = ()) -> Any:
    """A cluster whose scheduler says one after another who holds the streams, and where they are."""
    said, at = iter(replies), iter(cursors)

    def holders() -> Any:
        if (found := next(said)) is None:
            raise SchedulerUnavailable("away")
        return SimpleNamespace(holders=found)

    streams = SimpleNamespace(
        job="run",
        num_streams=1,
        patience_seconds=0.0,
        holders=holders,
        has_others=lambda: any(holders().holders),
        cursors=lambda: next(at),
    )
    return SimpleNamespace(streams=lambda *_, **__: streams)


class NoBatches(SharedBatches):
    some = None  # type: ignore[assignment]


def shared_batches(replies: Iterable[Any], cursors: Iterable[Any] = ()) -> SharedBatches:
    reader: Any = lambda: SimpleNamespace(close=lambda: None)  # noqa: E731
    no: Any = None
    return NoBatches(reader, 2, "", CtrRecipe(), no, cluster_of(replies, cursors), "run", None)


def test_there_are_others_where_the_scheduler_says_so_or_cannot_say() -> None:
    batches = shared_batches([FREE, HELD, None])
    assert [batches.has_others for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(("has_ended", "seconds"), [(False, 0.4 + 1.5), (True, 0.0)])
def test_a_worker_is_alone_once_nobody_has_read_for_a_while_or_the_data_has_ended(
    monkeypatch: pytest.MonkeyPatch, has_ended: bool, seconds: float
) -> None:
    now = [0.0]

    def sleep(pause: float) -> None:
        now[0] += pause

    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    batches = shared_batches(repeat(FREE) if has_ended else chain([HELD, FREE, HELD], repeat(FREE)))
    if has_ended:
        batches.close()
    batches.wait_alone()
    assert seconds <= now[0] < seconds + 0.4


def test_rows_in_which_others_have_trained_since_are_not_saved_at_the_end_of_a_run() -> None:
    here, there = {0: (0, 5)}, {0: (0, 9)}
    batches = shared_batches([FREE, FREE, HELD], [here, here, there])
    batches.close()
    batches.where()
    batches.require_alone()
    for _ in range(2):
        with pytest.raises(SnapshotFailed, match="another worker has trained on samples of job 'run' meanwhile"):
            batches.require_alone()


def test_rows_in_which_others_have_trained_though_this_one_seems_alone_are_not_saved() -> None:
    batches = shared_batches([], [{0: (0, 5)}, {0: (0, 9)}])
    batches.where()
    with pytest.raises(SnapshotFailed, match="another worker has trained"):
        batches.require_alone()


def test_each_epoch_keeps_other_samples_without_a_click() -> None:
    count = 500
    ids = {"user": np.arange(count) % 9, "item": np.arange(count)}  # an item names its sample
    schema = SampleSchema(item=("item",), user="user")
    samples = ClickSamples(fields=ids, clicks=np.zeros(count, np.float32), times=None, schema=schema)
    recipe = CtrRecipe(mode="async", negatives=0.5, epochs=2)
    batches = SharedInMemory(samples, recipe, Design(recipe, layout_of(samples)), cluster_of([]), "run", None)
    reader, kept = batches._make_reader(), list[set[int]]()
    reader.add(dict.fromkeys(range(NUM_STREAMS), (0, 0)))
    for epoch in range(2):
        kept.append(set())
        while (batch := reader.next_batch(epoch)) is not None:
            kept[-1].update(batches._click_batch(batch).ids["item"].tolist())
    assert all(0.4 < len(part) / batches.num_trained < 0.6 for part in kept)
    assert len(kept[0] & kept[1]) < 0.35 * batches.num_trained
