"""Joins Taobao's published files to samples that ``geartrain worker ctr`` reads: one share of the users after another.

    python examples/taobao.py ads FOLDER samples/         raw_sample, ad_feature, user_profile and behavior_log (.csv)
    python examples/taobao.py behaviour FOLDER samples/   UserBehavior.csv

Memory: the ads, the profiles, and one of ``--shares`` of the users with all they did. Needs pyarrow.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import csv

Ids = npt.NDArray[np.int64]
LATEST = 50
"""Largest number of events in a history."""
EVENTS = ["user", "time", "kind", "item_category", "item_brand"]
ADS = ["item", "item_category", "item_campaign", "item_customer", "item_brand", "price"]
SAMPLES = ["user", "time", "item", "place", "not_clicked", "click"]
PROFILES = ["user", "segment", "group", "gender", "age", "spending", "shopping", "student", "city"]
BEHAVIOUR = ["user", "item", "item_category", "kind", "time"]


def main() -> None:
    """Write a Parquet file for each share of the users."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ads", "behaviour"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shares", type=int, default=64)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if any(given.out.glob("*.parquet")):
        parser.error(f"{given.out} has files of samples already, which would be read beside these; give another folder")
    with tempfile.TemporaryDirectory(dir=given.out) as scratch:
        tables = (ad_samples if given.what == "ads" else next_items)(given.folder, Path(scratch), given.shares)
        for share, table in enumerate(tables):
            pq.write_table(table, given.out / f"{share:03}.parquet")


def ad_samples(folder: Path, scratch: Path, shares: int) -> Iterator[Any]:
    """Yield samples: impressions of ads, with a history of categories and brands of the user's earlier events."""
    ads = _reader(folder / "ad_feature.csv", ADS).read_all().drop(["price"])
    profiles = _reader(folder / "user_profile.csv", PROFILES).read_all()
    log = _shared(folder / "behavior_log.csv", EVENTS, scratch / "log", shares)
    samples = _shared(folder / "raw_sample.csv", SAMPLES, scratch / "samples", shares)
    for own_log, own in zip(log, samples, strict=True):
        events = own_log.sort_by([("user", "ascending"), ("time", "ascending")])
        own = own.drop(["not_clicked"]).join(ads, "item").join(profiles, "user")
        own = own.sort_by([("user", "ascending"), ("time", "ascending")])
        begin, end = _before(
            _column(events, "user"), _column(events, "time"), _column(own, "user"), _column(own, "time")
        )
        for name in ("category", "brand"):
            own = own.append_column(f"seen_{name}", _lists(_column(events, f"item_{name}"), begin, end))
        yield pa.table({name: _known(own.column(name)) for name in own.column_names})


def next_items(folder: Path, scratch: Path, shares: int) -> Iterator[Any]:
    """Yield two samples for each event that has earlier ones of its user: the clicked item, and one that was not.

    The other item is drawn in proportion to its number of events.
    """
    random = np.random.default_rng(0)
    for events in _shared(folder / "UserBehavior.csv", BEHAVIOUR, scratch / "events", shares, has_header=False):
        events = events.sort_by([("user", "ascending"), ("time", "ascending")])
        columns = {name: _column(events, name) for name in ("user", "time", "item", "item_category")}
        begin, end = _before(columns["user"], columns["time"], columns["user"], columns["time"])
        later = np.flatnonzero(end > begin)
        drawn = random.integers(len(end), size=len(later))
        for _ in range(100):  # an end, where there is one item only
            same = np.flatnonzero(columns["item"][drawn] == columns["item"][later])
            drawn[same] = random.integers(len(end), size=len(same))
        rows = np.stack([later, later], 1).reshape(-1)  # the clicked one, then the other
        items = np.stack([later, drawn], 1).reshape(-1)
        yield pa.table(
            {
                "user": columns["user"][rows],
                "time": columns["time"][rows],
                "item": columns["item"][items],
                "item_category": columns["item_category"][items],
                "seen": _lists(columns["item"], begin[rows], end[rows]),
                "seen_category": _lists(columns["item_category"], begin[rows], end[rows]),
                "click": np.arange(len(rows)) % 2 == 0,
            }
        )


def _reader(path: Path, names: Sequence[str], *, has_header: bool = True) -> Any:
    texts = dict.fromkeys(("kind", "place"), pa.string())
    return csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=names, skip_rows=int(has_header)),
        convert_options=csv.ConvertOptions(
            column_types={name: texts.get(name, pa.float64() if name == "price" else pa.int64()) for name in names},
            null_values=["", "NULL"],
        ),
    )


def _shared(path: Path, names: Sequence[str], scratch: Path, shares: int, *, has_header: bool = True) -> Iterator[Any]:
    """Yield the rows of each share of the users."""
    reader = _reader(path, names, has_header=has_header)
    schema = reader.schema.append(pa.field("share", pa.int64()))
    batches = (
        pa.RecordBatch.from_arrays([*batch.columns, pa.array(batch.column("user").to_numpy() % shares)], schema=schema)
        for batch in reader
    )
    ds.write_dataset(batches, scratch, schema=schema, format="parquet", partitioning=["share"])
    for share in range(shares):
        place = scratch / str(share)
        yield ds.dataset(place, schema=reader.schema).to_table() if place.exists() else reader.schema.empty_table()


def _known(column: Any) -> Any:
    """Return the column with -1, which is no id, for missing integers."""
    return column.fill_null(-1) if pa.types.is_integer(column.type) else column


def _column(table: Any, name: str) -> Ids:
    """Return a column of ids; missing ones are 0."""
    return np.asarray(pc.fill_null(table.column(name), 0).to_numpy(), np.int64)


def _before(users: Ids, times: Ids, of_users: Ids, of_times: Ids) -> tuple[Ids, Ids]:
    """Return where the latest events of its user before each sample begin and end; events are sorted."""
    keys = (users << 32) + times
    end = np.searchsorted(keys, (of_users << 32) + of_times, "left")
    begin = np.searchsorted(keys, of_users << 32, "left")
    return np.maximum(begin, end - LATEST), end


def _lists(values: Ids, begin: Ids, end: Ids) -> Any:
    ends = np.cumsum(end - begin)
    starts = ends - (end - begin)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begin - starts, end - begin)
    return pa.LargeListArray.from_arrays(np.concatenate([[0], ends]), values[places])


if __name__ == "__main__":
    main()
