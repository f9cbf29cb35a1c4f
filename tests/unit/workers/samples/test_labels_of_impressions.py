"""Impressions wait for their clicks by event time; whoever stops, each is given once, and with the same label."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
WINDOW = 60.0


def rows(*of: tuple[int, float, int]) -> Any:
    """(impression, time, click) each; a click has no user."""
    ids, times, clicks = zip(*of, strict=True)
    users = [None if click else id_ * 10 for id_, _, click in of]
    tags = [[] if click else [id_] * (id_ % 3) for id_, _, click in of]
    columns = {"impression": ids, "time": times, "click": clicks, "user": users, "tags": tags}
    return pa.table(columns).set_column(2, "click", pa.array(clicks, pa.float32()))


def day(count: int, seed: int = 0) -> tuple[Any, dict[int, float]]:
    """Impressions a second each, of which a third is clicked on, some too late; and the labels of all."""
    random = np.random.default_rng(seed)
    events, labels = [], {}
    for id_ in range(count):
        events.append((id_, float(id_), 0))
        labels[id_] = 0.0
        if random.random() < 0.3:
            delay = float(random.integers(1, 2 * int(WINDOW)))
            events.append((id_, id_ + delay, 1))
            labels[id_] = float(delay <= WINDOW)
    events.sort(key=lambda event: (event[1], event[2], event[0]))
    return rows(*events), labels


def samples(place: Path, table: Any, batch_size: int = 64, **labels: Any) -> gt.ParquetSamples:
    pq.write_table(table, place / "events.parquet", row_group_size=100)
    late = gt.LateLabels(**{"window_seconds": WINDOW, **labels})
    fill = {"user": -1}
    return gt.ParquetSamples(place / "events.parquet", batch_size=batch_size, fill=fill, late_labels=late)


def labels_of(batches: Any) -> list[tuple[int, float]]:
    found = []
    for batch in batches:
        assert (batch["user"] == batch["impression"] * 10).all()
        assert (batch["tags"][1].diff() == batch["impression"] % 3).all()
        found += list(zip(batch["impression"].tolist(), batch["click"].tolist(), strict=True))
    return found


def test_each_impression_comes_once_with_its_click_if_that_came_in_time(tmp_path: Path) -> None:
    table, labels = day(1000)
    found = labels_of(samples(tmp_path, table))
    assert [id_ for id_, _ in found] == list(range(1000)) and dict(found) == labels
    assert 0.1 < np.mean(list(labels.values())) < 0.2


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_what_waits_is_in_the_state_and_nothing_is_lost_or_doubled(tmp_path: Path, batch_size: int) -> None:
    table, labels = day(300)
    found: list[tuple[int, float]] = []
    state: Any = None
    while len(found) < 300:
        reader = samples(tmp_path, table, batch_size)  # a process of its own each time
        if state is not None:
            reader.load_state_dict(state)
        batch = next(iter(reader))
        found += labels_of([batch])
        state = reader.state_dict(batch)
    assert [id_ for id_, _ in found] == list(range(300)) and dict(found) == labels


def test_workers_that_come_and_go_give_each_impression_once(tmp_path: Path) -> None:
    table, labels = day(600)
    given: Counter[int] = Counter()
    with gt.local() as cluster:
        for worker in range(40):
            with samples(tmp_path, table).shared(cluster, "job", worker=f"w{worker}", num_streams=3) as batches:
                for done, batch in enumerate(batches):
                    if done == 2:
                        break  # it was handed out, and is not committed
                    batches.commit(batch)
                    given.update(batch["impression"].tolist())
    assert given == Counter(labels.keys())


def test_clicks_that_come_too_late_or_before_and_of_nothing_are_counted(tmp_path: Path) -> None:
    table = rows(
        (7, 1.0, 1), (7, 2.0, 0), (8, 3.0, 0), (8, 63.0, 1), (9, 4.0, 0), (9, 64.5, 1), (5, 65.0, 1), (6, 70.0, 0)
    )  # fmt: skip
    batches = iter(samples(tmp_path, table, batch_size=2))
    assert labels_of(batches) == [(7, 0.0), (8, 1.0), (9, 0.0), (6, 0.0)]
    counts = {metric.name: metric.samples[0][1] for metric in batches._reader.metrics()}  # type: ignore[attr-defined]
    assert counts["stream_late_clicks_total"] == 3 and counts["stream_forced_impressions_total"] == 0


def test_no_more_impressions_wait_than_is_said(tmp_path: Path) -> None:
    table, _ = day(500)
    batches = iter(samples(tmp_path, table, batch_size=10, window_seconds=1e9, max_waiting=50))
    waiting = []
    found = []
    for batch in batches:
        found += batch["impression"].tolist()
        waiting.append(len(batches._reader._waiting[0].times))  # type: ignore[attr-defined]
    assert found == list(range(500)) and max(waiting) <= 60
    assert batches._reader.forced == 450  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_seconds": 0}, "window_seconds is 0; it must be above 0"),
        ({"window_seconds": 1, "max_waiting": 0}, "max_waiting is 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        gt.LateLabels(**given)


def test_rows_out_of_order_and_without_the_columns_are_refused(tmp_path: Path) -> None:
    table, _ = day(10)
    pq.write_table(table.drop_columns(["impression"]), tmp_path / "a.parquet")
    late = gt.LateLabels(window_seconds=1.0)
    with pytest.raises(gt.errors.ColumnMismatch, match="need a column 'impression' of single values"):
        list(gt.ParquetSamples(tmp_path / "a.parquet", batch_size=4, fill={"user": -1}, late_labels=late))
    with pytest.raises(gt.errors.InvalidArgument, match="seed is 3, and labels that come late need rows in their"):
        gt.ParquetSamples(tmp_path / "a.parquet", batch_size=4, seed=3, late_labels=late)


def test_each_epoch_of_a_job_has_the_same_labels(tmp_path: Path) -> None:
    table, labels = day(300)
    reader = samples(tmp_path, table)
    found: list[tuple[int, float]] = []
    with gt.local() as cluster, reader.shared(cluster, "job", worker="w", num_streams=1, epochs=3) as batches:
        for batch in batches:
            found += labels_of([batch])
            batches.commit(batch)
    assert [dict(found[start : start + 300]) for start in (0, 300, 600)] == [labels] * 3


def test_times_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    table = rows((0, 0.0, 0), (1, float("nan"), 0), (0, 2.0, 1))
    reader = samples(tmp_path, table, batch_size=1)._reader(samples(tmp_path, table)._order(1), 1)
    reader.add({0: (0, 0)})
    for _ in range(2):  # going on reads the same again, and passes over nothing
        with pytest.raises(gt.errors.SourceDamaged, match="'time' is nan at position 1 of a stream"):
            for _ in range(5):
                reader.next_batch(0)
    with pytest.raises(gt.errors.InvalidArgument, match="window_seconds is inf; it must be above 0, and finite"):
        gt.LateLabels(window_seconds=float("inf"))
