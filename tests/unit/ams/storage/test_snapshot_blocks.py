"""Blocks come back bit for bit, and what is no block is refused before the disk is touched."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from geartrain.ams.storage.snapshot.blocks import write_block, write_job_file
from geartrain.ams.storage.snapshot.folder import Snapshot, Staging, new_staging, open_snapshot
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged, SnapshotFailed
from geartrain.ams.values.placement import even_placement

IDS = np.arange(5, dtype=np.int64)
DTYPES = [
    *(np.dtype(f"{kind}{8 * size}") for kind in ("int", "uint") for size in (1, 2, 4, 8)),
    *(np.dtype(name) for name in ("bool", "float16", "float32", "float64")),
    np.dtype(ml_dtypes.bfloat16),
]


def write(staging: Staging, arrays: dict[str, np.ndarray], **overrides: Any) -> FileEntry:
    named = {"snapshot_id": staging.id, "kind": "rows", "table": "t", "shard": 0, "index": 0, **overrides}
    return write_block(staging.path, arrays=arrays, **named)


def commit(staging: Staging, *files: FileEntry) -> Snapshot:
    return open_snapshot(
        staging.commit(step=0, created=0.0, num_shards=1, bucket_shards=even_placement(1), tables=[], files=files)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_a_block_comes_back_bit_for_bit(tmp_path: Path, dtype: np.dtype, num_rows: int) -> None:
    rows = np.random.default_rng(0).integers(0, 2, size=(num_rows, 3)).astype(dtype)
    staging = new_staging(tmp_path, "a")
    entry = write(staging, {"ids": IDS[:num_rows], "rows": rows, "slots": rows * rows, "scalar": rows.sum()})
    snapshot = commit(staging, entry)
    arrays = snapshot.read(entry)
    assert (entry.num_rows, snapshot.verify()) == (num_rows, [])
    assert arrays["rows"].dtype == dtype
    assert arrays["rows"].shape == (num_rows, 3)
    assert arrays["rows"].tobytes() == rows.tobytes()
    assert arrays["slots"].tobytes() == (rows * rows).tobytes()
    assert arrays["ids"].tolist() == IDS[:num_rows].tolist()
    assert arrays["scalar"].shape == ()
    arrays["rows"][:] = 0  # writable, and apart from other reads
    assert snapshot.read(entry)["rows"].tobytes() == rows.tobytes()


@given(
    arrays=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name not in ("__metadata__", "ids", "rows", "slots", "steps")),
        st.sampled_from([*DTYPES, np.dtype(">i4"), np.dtype(">f8")]).flatmap(
            lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
                lambda shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype)
            )
        ),
        max_size=6,
    ),
    is_turned=st.booleans(),
)
@example(arrays={"b": np.ones(3, np.int8), "a": np.ones(2, np.int8), "w": np.ones(1)}, is_turned=False)
def test_a_block_is_what_the_library_writes(arrays: dict[str, np.ndarray], is_turned: bool) -> None:
    if is_turned:  # not C-contiguous
        arrays = {name: array.T[::-1] if array.ndim else array for name, array in arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        staging = new_staging(folder, "a")
        data = (Path(staging.path) / write(staging, arrays).path).read_bytes()
    labels = {"snapshot": staging.id, "kind": "rows", "table": "t", "shard": "0", "index": "0"}
    library = save({name: np.asarray(array, order="C") for name, array in arrays.items()}, labels)
    assert dict(deserialize(data)) == dict(deserialize(library))  # type: ignore[no-untyped-call]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == labels
    assert all((8 + length + header[name]["data_offsets"][0]) % arrays[name].itemsize == 0 for name in header)


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    rows = np.array([[0x7FC00001, 0x80000000, 0x7F800000, 1]], np.uint32).view(np.float32)
    staging = new_staging(tmp_path, "a")
    entry = write(staging, {"ids": IDS[:1], "rows": rows})
    assert commit(staging, entry).read(entry)["rows"].tobytes() == rows.tobytes()


@pytest.mark.parametrize(
    "rows",
    [np.arange(15.0).reshape(3, 5).T, np.arange(30.0).reshape(5, 6)[:, ::2], np.arange(15, dtype=">f8").reshape(5, 3)],
    ids=["transposed", "strided", "big-endian"],
)
def test_an_array_is_written_by_value_however_it_lies_in_memory(tmp_path: Path, rows: np.ndarray) -> None:
    staging = new_staging(tmp_path, "a")
    entry = write(staging, {"ids": IDS, "rows": rows})
    np.testing.assert_array_equal(commit(staging, entry).read(entry)["rows"], rows)


def test_a_block_without_ids_counts_its_rows_and_one_of_other_arrays_none(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    dense = write(staging, {"rows": np.zeros((7, 2), np.float32), "first": np.array(3)})
    marks = write(staging, {"streams": np.arange(4)}, kind="streams")
    snapshot = commit(staging, dense, marks)
    assert (dense.num_rows, marks.num_rows, snapshot.verify()) == (7, 0, [])


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"ids": IDS.astype(np.int32)}, "int32"),
        ({"ids": IDS.reshape(5, 1)}, r"\(5, 1\)"),
        (
            {"ids": IDS, "rows": np.zeros((4, 2))},
            r"'rows' has shape \(4, 2\); its first dimension must be the number of rows, 5 as that",
        ),
        ({"rows": np.zeros((4, 2)), "slots": np.zeros((5, 2))}, r"'slots' has shape \(5, 2\)"),
        ({"rows": np.array(1.0)}, r"'rows' has shape \(\)"),
        ({"names": np.array(["x"])}, "'names' has dtype <U1"),
        ({"objects": np.array([None])}, "'objects' has dtype object"),
        ({"__metadata__": IDS}, "__metadata__"),
    ],
)
def test_arrays_that_are_no_block_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], named: str) -> None:
    staging = new_staging(tmp_path, "a")
    with pytest.raises(InvalidArgument, match=named):
        write(staging, arrays)
    assert not list(Path(staging.path).iterdir())


@pytest.mark.parametrize(
    "overrides",
    [{"kind": "job"}, {"kind": "Rows"}, {"kind": "../x"}, {"shard": -1}, {"index": -1}, {"snapshot_id": "0" * 32}],
    ids=str,
)
def test_labels_that_cannot_be_are_refused(tmp_path: Path, overrides: dict[str, Any]) -> None:
    staging = new_staging(tmp_path, "a")
    with pytest.raises(InvalidArgument, match=str(next(iter(overrides.values())))):
        write(staging, {"ids": IDS}, **overrides)
    assert not list(Path(staging.path).iterdir())


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 101])
def test_a_file_of_the_job_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    staging = new_staging(tmp_path, "a")
    with pytest.raises(InvalidArgument, match="name is"):
        write_job_file(staging.path, snapshot_id=staging.id, name=name, data=b"")


def test_tables_that_look_alike_in_file_names_do_not_meet(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    entries = [write(staging, {"ids": IDS}, table=table) for table in ("a/b", "a b", "a_b", "x" * 199, "x" * 200)]
    assert len({entry.path for entry in entries}) == 5
    assert commit(staging, *entries).verify() == []


def test_a_block_written_twice_is_the_second_one(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    write(staging, {"ids": IDS})
    entry = write(staging, {"ids": IDS + 1})
    assert commit(staging, entry).read(entry)["ids"].tolist() == [1, 2, 3, 4, 5]


def test_after_abandoning_a_late_writer_is_told_so(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    staging.abandon()
    with pytest.raises(SnapshotFailed, match="abandoned"):
        write(staging, {"ids": IDS})
    assert not list(tmp_path.iterdir())


def test_an_entry_of_another_snapshot_is_not_read(tmp_path: Path) -> None:
    first, second = new_staging(tmp_path, "a"), new_staging(tmp_path, "b")
    commit(first, write(first, {"ids": IDS}))
    other = write(second, {"ids": IDS})
    commit(second, other)
    with pytest.raises(SnapshotDamaged, match=r"5 rows .*table 't' on shard 0"):
        open_snapshot(tmp_path / "a").read(other)


def test_labels_catch_a_block_whose_hash_was_made_to_fit(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    zero, one = (write(staging, {"ids": IDS}, shard=shard) for shard in (0, 1))
    (Path(staging.path) / zero.path).write_bytes((Path(staging.path) / one.path).read_bytes())
    forged = zero.model_copy(update={"xxh3_128": one.xxh3_128})
    snapshot = open_snapshot(
        staging.commit(
            step=0, created=0.0, num_shards=2, bucket_shards=even_placement(2), tables=[], files=[forged, one]
        )
    )
    with pytest.raises(SnapshotDamaged, match=r"says of itself .*'shard': '1'.*on shard 0"):
        snapshot.read(forged)


def test_state_of_the_job_is_bytes(tmp_path: Path) -> None:
    staging = new_staging(tmp_path, "a")
    entry = write_job_file(staging.path, snapshot_id=staging.id, name="rng-rank0.bin", data=b"\x00\xff")
    snapshot = commit(staging, entry)
    assert snapshot.read_bytes(entry) == b"\x00\xff"
    with pytest.raises(InvalidArgument, match="read_bytes"):
        snapshot.read(entry)
