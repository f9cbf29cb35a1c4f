"""Flights as samples: what is late, which fields there are, what is held out, and when they cannot be had."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain.workers.ctr.samples.click_samples import split
from geartrain.workers.ctr.samples.flights import find_flights, read_flights

pa = pytest.importorskip("pyarrow", reason="flights need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="flights need the extra data")


def test_flights_become_clicks_and_ids_and_later_months_are_held_out(tmp_path: Path) -> None:
    dates = [datetime(2001, 1, 1, 0, 1), datetime(2001, 4, 30, 23, 59), datetime(2001, 5, 1), datetime(2001, 6, 30, 9)]
    table = pa.table(
        {
            "date": pa.array(dates, pa.timestamp("us")),
            "delay": [16, 15, -5, 300],
            "distance": [2176, 99, 100, 405],
            "origin": pa.array(["LAS", "ATL", "LAS", "MCI"], pa.large_string()),
            "destination": pa.array(["PHL", "SAV", "MDW", "MDW"], pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "flights.parquet")
    samples = read_flights(tmp_path / "flights.parquet")
    assert samples.clicks.tolist() == [1, 0, 0, 1]
    fields = {name: ids.tolist() for name, ids in samples.fields.items()}
    assert fields["origin"] == gt.hash_strings(["LAS", "ATL", "LAS", "MCI"]).tolist()
    assert fields["weekday"] == [date.weekday() for date in dates]
    assert fields["hour"] == [0, 23, 0, 9]
    assert fields["slot"] == [0, 143, 0, 54]
    assert fields["distance"] == [21, 0, 1, 4]
    train, test = split(samples, "time", 0)
    np.testing.assert_array_equal(train.times, samples.times[:2])
    assert len(test) == 2


def test_without_npm_or_the_pinned_file_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(gt.errors.ConfigError, match=r"flights-3m.parquet is not in .*flights, and there is no npm"):
        find_flights(tmp_path, lambda _: None)
    assert list((tmp_path / "flights").iterdir()) == []
    (tmp_path / "flights" / "flights-3m.parquet").write_bytes(b"other")
    with pytest.raises(gt.errors.ConfigError, match="but it is pinned to"):
        find_flights(tmp_path, lambda _: None)
