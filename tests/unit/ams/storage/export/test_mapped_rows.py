"""Tables in files that are asked as they lie there: every row found, none invented, of any size."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from geartrain.ams.kernels.embedding import MappedRows
from geartrain.ams.storage.export import mapped_rows
from geartrain.ams.storage.tensor_file import map_tensors
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec


def opened(path: Path) -> MappedRows:
    arrays = map_tensors(path)
    return MappedRows([(arrays["starts"], arrays["ids"], arrays["weight"])])


@pytest.mark.parametrize("num", [0, 1, 3, 4, 5, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_is_found_and_no_other(tmp_path: Path, num: int, dtype: str) -> None:
    rng = np.random.default_rng(num)
    ids = np.unique(np.concatenate([np.arange(min(num, 3)), rng.integers(0, 2**63 - 1, num)]))
    spec = TableSpec(name="t", dim=3, optimizer=SGD(0.1), dtype=dtype)
    rows = rng.standard_normal((len(ids), 3)).astype(spec.numpy_dtype)
    order = rng.permutation(len(ids))
    blocks = [(ids[part], rows[part]) for part in np.array_split(order, 3)]
    assert mapped_rows.write_mapped(tmp_path / "t.safetensors", spec, len(ids) + 7, blocks) == len(ids)

    others = np.setdiff1d(rng.integers(0, 2**63 - 1, 100), ids)
    wanted = rng.permutation(np.concatenate([ids, ids, others]))
    out = np.full((len(wanted), 3), 9, spec.numpy_dtype)
    missing = opened(tmp_path / "t.safetensors").pull([0], [wanted], out=[out])[0]
    np.testing.assert_array_equal(missing, np.flatnonzero(np.isin(wanted, others)))
    there = ~np.isin(wanted, others)
    np.testing.assert_array_equal(out[there], rows[np.searchsorted(ids, wanted[there])])
    assert (out[~there] == 9).all()


def test_a_table_is_written_in_parts_that_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TableSpec(name="t", dim=2, optimizer=SGD(0.1))
    ids = np.random.default_rng(0).permutation(20_000)
    rows = np.stack([ids, -ids], 1).astype(np.float32)
    blocks = list(zip(np.array_split(ids, 11), np.array_split(rows, 11), strict=True))
    mapped_rows.write_mapped(tmp_path / "whole", spec, len(ids), blocks)
    monkeypatch.setattr(mapped_rows, "_PART_BYTES", 4096)
    mapped_rows.write_mapped(tmp_path / "parts", spec, len(ids), blocks)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_file_is_one_of_safetensors(tmp_path: Path) -> None:
    spec = TableSpec(name="t", dim=2, optimizer=SGD(0.1), dtype="bfloat16")
    rows = np.ones((4, 2), ml_dtypes.bfloat16)
    mapped_rows.write_mapped(tmp_path / "t", spec, 4, [(np.arange(4), rows)])
    with safe_open(str(tmp_path / "t"), "numpy") as file:
        assert sorted(file.get_tensor("ids").tolist()) == [0, 1, 2, 3]


def test_a_damaged_directory_leads_nowhere() -> None:
    """Whatever the starts are, nothing outside the arrays is read."""
    ids = np.arange(100)
    rows = np.ones((100, 2), np.float32)
    for starts in ([-5, 2**62], [2**62, -1], [100, 100], [-(2**63), 2**63 - 1]):
        found = MappedRows([(np.array(starts), ids, rows)])
        out = np.zeros((2, 2), np.float32)
        assert found.pull([0], [np.array([3, 2**62])], out=[out])[0][-1] == 1
    for starts, wrong in [([0], rows), ([0, 1, 2, 3], rows), ([0, 100], rows[1:])]:
        with pytest.raises(ValueError, match=r"must (be|have)"):
            MappedRows([(np.array(starts), ids, wrong)])


def test_several_tables_are_asked_at_once() -> None:
    tables = [(np.array([0, 3]), np.arange(3), np.full((3, dim), dim, np.float32)) for dim in (1, 2, 3)]
    ids = [np.array([7, 1, 8]), np.array([2]), np.array([9])]
    out = [np.zeros((len(own), dim), np.float32) for own, dim in zip(ids, (3, 1, 2), strict=True)]
    missing = MappedRows(tables).pull([2, 0, 1], ids, out=out)
    assert {at: places.tolist() for at, places in missing.items()} == {0: [0, 2], 2: [0]}
    assert [rows.tolist() for rows in out] == [[[0, 0, 0], [3, 3, 3], [0, 0, 0]], [[1]], [[0, 0]]]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_are_written_to_columns_of_a_wider_array(dtype: type) -> None:
    rows = MappedRows([(np.array([0, 3]), np.arange(3), np.arange(6).reshape(3, 2).astype(dtype))])
    wide = np.full((3, 5), 9, dtype)
    assert rows.pull([0], [np.array([2, 7, 0])], out=[wide[:, 1:3]])[0].tolist() == [1]
    assert wide.tolist() == [[9, 4, 5, 9, 9], [9, 9, 9, 9, 9], [9, 0, 1, 9, 9]]
    for out in (wide[::-1, 1:3], wide[:, ::2][:, :2], np.zeros((2, 3), dtype).T):
        with pytest.raises(ValueError, match=r"rows? of out must"):
            rows.pull([0], [np.array([2, 7, 0])], out=[out])


def test_rows_stay_in_the_file_so_that_a_table_may_be_larger_than_memory(tmp_path: Path) -> None:
    """What a process has of its own does not grow by them: pages of a file go when memory is wanted."""
    spec = TableSpec(name="t", dim=64, optimizer=SGD(0.1))
    ids = np.arange(200_000)
    rows = np.broadcast_to(ids[:, None].astype(np.float32), (len(ids), 64))
    mapped_rows.write_mapped(tmp_path / "t", spec, len(ids), [(ids, rows)])

    def own_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    table, out = opened(tmp_path / "t"), np.empty((1000, 64), np.float32)
    before = own_bytes()
    for part in ids.reshape(-1, 1000):
        assert not table.pull([0], [part], out=[out])
        assert (out[:, 5] == part).all()
    assert own_bytes() - before < 51_200_000 // 8
