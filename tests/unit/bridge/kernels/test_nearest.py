"""The nearest rows that the kernel finds are those of float64, whatever the order of blocks and where hits overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from geartrain.ams.kernels import neighbours as ops
from geartrain.bridge.kernels import nearest
from geartrain.bridge.kernels.nearest import NONE, RunningNearest, ids_of, scores_of, to_keys
from geartrain.bridge.kernels.triton import nearest as kernels


def rows_of(num: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = torch.randn(num, dim, generator=torch.Generator().manual_seed(num))
    return torch.nn.functional.normalize(rows, dim=1).to(dtype).to(device)


def products(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


def exact(rows: Tensor, others: Tensor, first_row: int, first: int) -> Tensor:
    scores = rows.double() @ others.double().T
    itself = torch.arange(len(rows))[:, None] + first_row == torch.arange(len(others))[None] + first
    return scores.masked_fill(itself.to(scores.device), -torch.inf)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and so are blocks of 8,192."""
    constants = {"tile_m": 16, "tile_n": 64, "tile_k": 16, "piece": 32, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(kernels, "tiles", lambda _, dim: {**constants, "even": dim % 16 == 0})
    monkeypatch.setattr(nearest, "STRIP", 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "num_others", "dim", "keep"), [(16, 64, 16, 4), (37, 150, 24, 5), (70, 260, 8, 3)]
)
@pytest.mark.usefixtures("small_tiles")
def test_the_nearest_are_those_of_float64(
    num_rows: int, num_others: int, dim: int, keep: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """The rows that search are some of the others; one is offered to none of itself."""
    others, first_row = rows_of(num_others, dim, dtype, kernel_device), 9
    rows = others[first_row : first_row + num_rows].clone()
    best = RunningNearest(first_row, num_rows, keep, kernel_device, products)
    assert best._hits_MW is not None
    best._hits_MW.fill_(-7)  # whatever memory holds
    best._thresholds_M.fill_(torch.nan)
    expected = exact(rows, others, first_row, 0)
    for start, stop in [(64, num_others), (0, 10), (10, 64)]:
        best.offer(0, rows, others[start:stop], start)
    best.merge_waiting()
    assert best.offered_M.tolist() == [num_others - 1] * num_rows
    found, ids = scores_of(best.best_MK), ids_of(best.best_MK).long()
    values, nearest_ids = expected.topk(keep, dim=1)
    torch.testing.assert_close(found.double(), values, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ids.cpu(), nearest_ids.cpu())  # no two products are that near


@pytest.mark.usefixtures("small_tiles")
def test_what_does_not_fit_is_found_again(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that come nearer and nearer are all above each floor."""
    rows = torch.zeros(3, 16, device=kernel_device)
    rows[:, 0] = torch.tensor([1.0, -1.0, 0.5])
    others = torch.zeros(200, 16, device=kernel_device)
    others[:, 0] = torch.linspace(0.1, 1, 200)
    best = RunningNearest(1000, 3, 4, kernel_device, products)
    sorted_by: list[int] = []
    by_sorting = RunningNearest._by_sorting
    monkeypatch.setattr(
        RunningNearest, "_by_sorting", lambda self, *given: (sorted_by.append(given[3]), by_sorting(self, *given))[1]
    )
    for start in range(0, 200, 50):
        best.offer(0, rows, others[start : start + 50], start)
    best.merge_waiting()
    expected = [[199, 198, 197, 196], [0, 1, 2, 3], [199, 198, 197, 196]]
    assert ids_of(best.best_MK).tolist() == expected
    assert sorted_by == [0, 32, 50, 100, 150]


@pytest.mark.usefixtures("small_tiles")
def test_of_equal_products_the_lowest_ids_are_kept_when_blocks_rise(kernel_device: torch.device) -> None:
    rows, others = torch.ones(2, 16, device=kernel_device), torch.ones(90, 16, device=kernel_device)
    best = RunningNearest(3, 2, 5, kernel_device, products)
    best.offer(0, rows, others, 0)
    best.merge_waiting()
    assert ids_of(best.best_MK).tolist() == [[0, 1, 2, 4, 5], [0, 1, 2, 3, 5]]


@pytest.mark.parametrize(
    ("num_rows", "num_others", "dim", "width"), [(5, 40, 16, 3), (9, 70, 67, 40), (3, 33, 200, 33)]
)
def test_exact_scores_are_those_of_the_cores_to_the_bit(
    num_rows: int, num_others: int, dim: int, width: int, kernel_device: torch.device
) -> None:
    """Of candidates that are among the others: the rest stays as it was."""
    random = np.random.default_rng(dim)
    rows, others = (random.standard_normal((num, dim)).astype(np.float32) for num in (num_rows, num_others))
    others[:7] *= 1e-30  # products far below float32's
    ids = random.integers(0, num_others + 60, (num_rows, width)).astype(np.int32)
    counts = random.integers(0, width + 1, num_rows).astype(np.int32)
    counts[0] = width
    expected = np.full((num_rows, width), np.nan)
    ops.exact_scores(rows, ids, counts, others, 30, expected, threads=1)
    given = [torch.from_numpy(array).to(kernel_device) for array in (rows, ids, counts, others)]
    found = torch.full((num_rows, width), torch.nan, dtype=torch.float64, device=kernel_device)
    nearest.exact_scores(*given, 30, found)
    np.testing.assert_array_equal(found.cpu().numpy(), expected)
    assert np.isfinite(expected).any() and np.isnan(expected).any()


def test_keys_rank_as_products_do_and_equal_ones_by_id() -> None:
    scores = torch.tensor([-torch.inf, -1.5, -1e-30, -0.0, 0.0, 1e-38, 0.25, 1.0])
    ids = torch.tensor([2**31 - 1, 5, 0, 4, 7, 9, 2**31 - 1, 3])
    keys = to_keys(scores, ids)
    torch.testing.assert_close(scores_of(keys), scores, rtol=0, atol=0)
    assert ids_of(keys).tolist() == ids.tolist()
    assert keys.argsort().tolist() == [0, 1, 2, 4, 3, 5, 6, 7] and keys[0] == NONE
