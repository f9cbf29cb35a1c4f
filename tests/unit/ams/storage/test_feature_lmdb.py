"""What only a file can do to a feature store: outlive its process, be in use, be damaged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.features import lmdb_features as feature_lmdb
from geartrain.ams.storage.features.lmdb_features import LmdbFeatures
from geartrain.ams.values.errors import StateDamaged

IDS = np.arange(200)
VALUES = [b"value %d " % item * 20 for item in range(200)]
FILE = "features/features.lmdb"


def filled(folder: Path, max_bytes: int | None = None) -> None:
    store = LmdbFeatures(folder, "features", max_bytes=max_bytes)
    for start in range(0, 200, 50):
        store.write(IDS[start : start + 50], VALUES[start : start + 50])
    store.close()


def test_records_and_the_order_of_their_writing_outlive_the_process(tmp_path: Path) -> None:
    filled(tmp_path)
    store = LmdbFeatures(tmp_path, "features")
    assert store.read(IDS) == VALUES
    store.write(IDS[:50], VALUES[:50])
    size = store.counts().stored_bytes
    store.close()
    assert size is not None
    smaller = LmdbFeatures(tmp_path, "features", max_bytes=size // 2)
    there = [value is not None for value in smaller.read(IDS)]
    assert all(there[:50]) and all(there[150:]) and not any(there[50:90])
    smaller.close()


def test_no_write_waits_for_the_disk(tmp_path: Path) -> None:
    store = LmdbFeatures(tmp_path, "features")
    assert not store._opened().flags()["sync"]
    store.close()


def test_a_large_store_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_lmdb, "_FIRST_MAP_BYTES", 1 << 20)
    store = LmdbFeatures(tmp_path, "features")
    store.write(np.arange(50), [bytes(100_000)] * 50)
    store.close()
    again = LmdbFeatures(tmp_path, "features")
    assert again.read(np.array([49])) == [bytes(100_000)]
    again.close()


def test_a_damaged_record_is_a_counted_miss(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b"value 33 ", b"value 32 ", 1))
    store = LmdbFeatures(tmp_path, "features")
    values = store.read(IDS)
    assert values == [*VALUES[:33], None, *VALUES[34:]] and store.counts().damaged == 1
    store.write(IDS[33:34], VALUES[33:34])
    assert store.read(IDS) == VALUES
    store.close()


def test_keys_that_became_equal_are_counted_once(tmp_path: Path) -> None:
    filled(tmp_path)
    data = bytearray((tmp_path / FILE).read_bytes())
    flipped = 0
    for item in range(100, 140, 2):
        key = b"\x08\0" + item.to_bytes(8, "big")  # behind the size of a key in a leaf
        if (at := data.find(key)) >= 0:
            data[at + len(key) - 1] ^= 1
            flipped += 1
    (tmp_path / FILE).write_bytes(data)
    store = LmdbFeatures(tmp_path, "features", max_bytes=200)
    assert flipped > 10 and store.counts().stored_bytes == 0
    store.write(IDS[:1], [b"new"])
    assert store.read(IDS[:2]) == [b"new", None]
    store.close()


def test_no_bit_flip_becomes_an_answer(tmp_path: Path) -> None:
    filled(tmp_path / "whole")
    rng = random.Random(3)
    size = (tmp_path / "whole" / FILE).stat().st_size
    found = 0
    for turn in range(6):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "whole", folder)
        data = bytearray((folder / FILE).read_bytes())
        bit = rng.randrange(8 * (size if turn % 4 else min(size, 8192)))
        data[bit // 8] ^= 1 << bit % 8
        (folder / FILE).write_bytes(data)
        try:
            store = LmdbFeatures(folder, "features")
        except StateDamaged as exc:
            assert "remove the folder" in str(exc)
            found += 1
            continue
        try:
            values = store.read(IDS)
            assert all(value in (None, whole) for value, whole in zip(values, VALUES, strict=True))
            found += None in values
        except StateDamaged:
            found += 1
        store.close()
        shutil.rmtree(folder)
    assert found >= 2
