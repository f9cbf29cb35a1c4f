"""The three products of a class head against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.optimizers.adam import Adam, AdamW
from geartrain.ams.values.optimizers.momentum import SGD, Momentum, SparseMomentum
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels import head as kernels
from geartrain.bridge.kernels.head import TILE, HeadPass
from geartrain.bridge.kernels.launch import interpreted
from geartrain.bridge.kernels.optimizers import RowStep, update_rows
from geartrain.bridge.kernels.rounding import round_rows
from geartrain.bridge.kernels.row_update import RowArrays, update
from geartrain.bridge.kernels.scaled import narrowed, widened

LOG2_E = math.log2(math.e)


@dataclass
class Problem:
    """Rows, some of them active, samples whose classes may lie elsewhere, and float64's answers."""

    rows_LD: Tensor
    scales_LK: Tensor | None
    numbers_A: Tensor | None
    count: int
    features_BD: Tensor
    positions_B: Tensor
    scale: float
    normalised: bool
    log2_weight: float
    own_weight_B: Tensor
    weights_B: Tensor

    def head(self, dtype: torch.dtype, *, shifted: bool) -> HeadPass:
        limit = self.scale * LOG2_E
        count = None if self.numbers_A is None else torch.tensor(self.count)
        made = HeadPass.of(
            self.rows_LD,
            self.numbers_A,
            (self.features_BD * limit).to(dtype),
            self.positions_B,
            count=count,
            log2_weight=self.log2_weight,
            logit_limit=limit if self.normalised else None,
            shifted=shifted,
            wants_highest=True,
            scales_LK=self.scales_LK,
        )
        for written in (made.inverse_A, made.sums_TB, made.highest_TB):
            assert written is not None
            written.fill_(torch.nan)
        return made

    def unit(self) -> tuple[Tensor, Tensor]:
        """(active rows as they count, inverse lengths), float64."""
        rows = self.rows_LD if self.scales_LK is None else widened(self.rows_LD, self.scales_LK, torch.float32)
        rows = (rows if self.numbers_A is None else rows[self.numbers_A[: self.count]]).double()
        inverse = rows.norm(dim=1).reciprocal() if self.normalised else torch.ones(len(rows), dtype=torch.float64)
        return rows * inverse.unsqueeze(1), inverse

    def logits(self) -> Tensor:
        """To base e, [A, B], −∞ for own classes, without weights."""
        logits = self.unit()[0] @ self.features_BD.double().t() * self.scale
        own = torch.arange(len(logits)).unsqueeze(1) == self.positions_B
        return logits.masked_fill(own, -torch.inf)

    def corrected(self) -> Tensor:
        own = torch.isin(torch.arange(self.count), self.positions_B)
        return self.logits() + torch.where(own, 0.0, self.log2_weight / LOG2_E).unsqueeze(1)

    def row_gradients(self, lse_B: Tensor) -> Tensor:
        unit, inverse = self.unit()
        weights = (self.corrected() - lse_B).exp()
        own = torch.arange(self.count).unsqueeze(1) == self.positions_B
        weights = torch.where(own, self.own_weight_B.double(), weights) * self.weights_B.double()
        gradient = weights @ self.features_BD.double()
        if self.normalised:
            gradient = (gradient - (gradient * unit).sum(1, keepdim=True) * unit) * inverse.unsqueeze(1)
        return gradient


def problem(
    num: int, batch: int, dim: int, *, normalised: bool, dtype: torch.dtype, picked: bool = False, scale: float = 8.0
) -> Problem:
    torch.manual_seed(num + dim)
    rows, scales = torch.randn(num, dim).mul_(0.3), None
    if dtype == torch.float8_e4m3fn:
        rows, scales = narrowed(rows * torch.rand(num, 1), dtype)
    rows = rows.to(dtype)
    features = torch.nn.functional.normalize(torch.randn(batch, dim))
    numbers, count = None, num
    if picked:
        count = num * 2 // 3
        numbers = torch.cat([torch.randperm(num)[:count].sort().values, torch.full((5,), 10**9)])
    positions = torch.randint(0, count, (batch,))
    positions[: batch // 3] = -1
    positions[-2:] = positions[-3]  # three samples of one class
    return Problem(
        rows_LD=rows,
        scales_LK=scales,
        numbers_A=numbers,
        count=count,
        features_BD=features,
        positions_B=positions,
        scale=scale,
        normalised=normalised,
        log2_weight=3.0 if picked else 0.0,
        own_weight_B=-torch.rand(batch),
        weights_B=torch.rand(batch) * 2 - 1,
    )


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


CASES = [
    pytest.param(300, 48, 64, True, False, False, id="margin"),
    pytest.param(200, 20, 33, True, True, True, id="margin, shifted, picked"),
    pytest.param(260, 37, 40, False, True, True, id="no margin, picked"),
]


@pytest.mark.parametrize(("num", "batch", "dim", "normalised", "shifted", "picked"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_equal_those_in_float64(
    num: int, batch: int, dim: int, normalised: bool, shifted: bool, picked: bool, dtype: torch.dtype
) -> None:
    check(problem(num, batch, dim, normalised=normalised, dtype=dtype, picked=picked), dtype, shifted=shifted)


@pytest.mark.parametrize(("num", "batch", "dim", "normalised", "shifted", "picked"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_equal_products_in_float64(
    num: int, batch: int, dim: int, normalised: bool, shifted: bool, picked: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    given = problem(num, batch, dim, normalised=normalised, dtype=dtype, picked=picked, scale=3.0)
    with interpreted():
        check(given, dtype, shifted=shifted)


@pytest.mark.parametrize(("num", "batch", "dim", "normalised", "shifted", "picked"), CASES)
@pytest.mark.parametrize("way", [nullcontext, interpreted], ids=["tensors", "kernels"])
def test_products_of_eight_bits_equal_those_in_float64(
    num: int, batch: int, dim: int, normalised: bool, shifted: bool, picked: bool, way: Callable[[], Any]
) -> None:
    pytest.importorskip("triton")
    eight = torch.float8_e4m3fn
    given = problem(num, batch, dim, normalised=normalised, dtype=eight, picked=picked, scale=3.0)
    with way():
        check(given, torch.float32, shifted=shifted)


def check(given: Problem, dtype: torch.dtype, *, shifted: bool) -> None:
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    head, logits, corrected = given.head(dtype, shifted=shifted), given.logits(), given.corrected()
    if dtype == torch.float16:  # which holds exponentials as small as these; the interpreter multiplies no bfloat16
        head = replace(head, dtype=dtype)
    kept = torch.full((head.num_active, len(given.features_BD)), torch.nan, dtype=head.dtype)
    ranges = [(0, TILE), (TILE, head.num_active)]
    for start, stop in ranges:
        kernels.exponentials(head, kept[start:stop], start, stop)
    shift = head.shift()
    assert head.highest_TB is not None
    assert torch.allclose(head.highest_TB.amax(0).double() / LOG2_E, logits.amax(0), atol=bound * given.scale)
    over_all = (torch.tensor(head.middle) if shift is None else shift).double() / LOG2_E
    log_sums = head.sums(shift).log() + over_all
    assert torch.allclose(log_sums, corrected.logsumexp(0), atol=bound * given.scale)
    parts = None
    for start, stop in ranges:
        parts = kernels.feature_gradient(head, kept[start:stop], start, stop, shift, parts)
    assert difference(parts.sum(0), (corrected - over_all).exp().t() @ given.unit()[0]) < bound
    own = torch.where((given.positions_B >= 0).unsqueeze(1), given.unit()[0][given.positions_B], 0.0)
    assert difference(head.own_rows(), own) < bound
    lse = corrected.logsumexp(0) + 0.1  # with the own class
    terms = kernels.sample_terms(head, given.features_BD, (lse * LOG2_E).float(), given.own_weight_B, given.weights_B)
    expected, factor = given.row_gradients(lse) * 0.7, torch.tensor(0.7)
    found = torch.cat([kernels.row_gradients(head, kept[a:b], a, b, terms, factor) for a, b in ranges])
    assert difference(found[: given.count], expected) < bound
    assert not found[given.count :].any()
    assert float(found.abs().max()) <= float(terms.bounds_B.sum()) * float(given.unit()[1].max())
    squares = sum(kernels.squared_norm(head, kept[a:b], a, b, terms, factor) for a, b in ranges)
    assert math.isclose(float(squares), float(expected.square().sum()), rel_tol=3 * bound)


OPTIMIZERS = [
    SGD(0.1, weight_decay=0.01),
    Momentum(0.1, weight_decay=0.01, nesterov=True),
    SparseMomentum(0.1),
    Adagrad(0.1, lr_decay=0.01),
    Adam(0.1),
    AdamW(0.1, weight_decay=0.1),
]


@dataclass
class Stored:
    """Rows, slots and steps before an update, and what it makes of them."""

    optimizer: RowOptimizerSpec
    rows: Tensor
    slots: Tensor | None
    steps: Tensor
    refused: Tensor

    @staticmethod
    def of(given: Problem, optimizer: RowOptimizerSpec) -> Stored:
        num, dim = given.rows_LD.shape
        slots = torch.rand(num, dim * len(optimizer.slots)) * 0.01
        if optimizer.takes_narrow_slots:
            slots = slots.to(given.rows_LD.dtype)
        steps = torch.randint(0, 9, (num,))
        return Stored(
            optimizer, given.rows_LD, slots if optimizer.slots else None, steps, torch.zeros((), dtype=torch.int64)
        )

    def update(self, given: Problem, factor: float = 0.7) -> Tensor:
        """In the kernel; returns the gradients that the reference has [active, D]."""
        pytest.importorskip("triton")
        head = given.head(torch.float32, shifted=False)
        kept = torch.full((head.num_active, len(given.features_BD)), torch.nan)
        lse = (given.corrected().logsumexp(0) + 0.1).float() * LOG2_E
        with interpreted():
            kernels.exponentials(head, kept, 0, head.num_active)
            terms = kernels.sample_terms(head, given.features_BD, lse, given.own_weight_B, given.weights_B)
            times = torch.tensor(factor)
            gradient = kernels.row_gradients(head, kept, 0, head.num_active, terms, times)[: given.count]
            kernels.update_rows(
                head,
                kept,
                0,
                head.num_active,
                terms,
                times,
                self.optimizer,
                RowArrays(
                    rows_LD=self.rows,
                    slots_LS=self.slots,
                    updates_L=self.steps,
                    refused=self.refused,
                    first=2**40,
                    key=2**64 - 7,
                ),
                lr=self.optimizer.lr,
            )
        return gradient


def difference_of_bits(found: Tensor, expected: Tensor) -> float:
    """Share of 16-bit numbers that differ, none of them by more than one place."""
    apart = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert apart.max() <= 1
    return float((apart > 0).float().mean())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_update_makes_the_steps_and_the_bits_of_the_reference(optimizer: RowOptimizerSpec, dtype: torch.dtype) -> None:
    given = problem(90, 20, 40, normalised=True, dtype=dtype, picked=True)
    numbers = torch.arange(90) if given.numbers_A is None else given.numbers_A[: given.count]
    stored = Stored.of(given, optimizer)
    rows, steps = stored.rows[numbers].float(), stored.steps[numbers] + 1
    slots = None if stored.slots is None else stored.slots[numbers].float()
    before = [stored.rows.clone(), None if stored.slots is None else stored.slots.clone(), stored.steps.clone()]
    gradient = stored.update(given)
    update_rows(optimizer, RowStep(rows, slots, gradient, optimizer.lr, steps))
    for part, (found, expected) in enumerate([(stored.rows, rows), (stored.slots, slots)]):
        if found is None or expected is None:
            continue
        if found.dtype == torch.float32:
            assert difference(found[numbers], expected.double()) < 1e-5
        else:
            made = round_rows(expected, found.dtype, key=2**64 - 7, ids_N=numbers + 2**40, numbers_N=steps, part=part)
            assert difference_of_bits(found[numbers], made) < 0.01
    assert torch.equal(stored.steps[numbers], steps)
    untouched = torch.ones(90, dtype=torch.bool)
    untouched[numbers] = False
    for found, expected in zip((stored.rows, stored.slots, stored.steps), before, strict=True):
        assert found is None or expected is None or torch.equal(found[untouched], expected[untouched])
    assert stored.refused == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_that_would_leave_its_range_stays_whole(dtype: torch.dtype) -> None:
    given = problem(150, 20, 136, normalised=True, dtype=dtype)
    stored = Stored.of(given, Momentum(10.0))
    assert stored.slots is not None
    stored.slots[7, 135] = torch.finfo(dtype).max  # the last of several parts of its columns
    before = [tensor[7].clone() for tensor in (stored.rows, stored.slots, stored.steps)]
    others = stored.slots.clone()
    stored.update(given)
    after = [tensor[7] for tensor in (stored.rows, stored.slots, stored.steps)]
    assert all(map(torch.equal, after, before))
    assert (stored.slots != others).any(1).sum() == 149
    assert stored.refused == 1


@pytest.mark.parametrize("normalised", [False, True])
def test_gradients_that_are_no_numbers_change_no_row(normalised: bool) -> None:
    for spoils in ("weights", "factor"):
        given = problem(150, 20, 33, normalised=normalised, dtype=torch.float32)
        stored = Stored.of(given, SGD(0.1))
        before = stored.rows.clone()
        if spoils == "weights":
            given.own_weight_B[:] = torch.nan
            given.weights_B[:] = torch.inf
        stored.update(given, 0.7 if spoils == "weights" else math.nan)
        assert torch.equal(stored.rows, before)
        assert stored.refused == 150


def test_a_gradient_along_few_columns_may_be_larger_than_any_feature() -> None:
    dim = 1024
    given = problem(2, 4, dim, normalised=True, dtype=torch.float16)
    given.features_BD[:] = dim**-0.5
    given.rows_LD[:, 0], given.rows_LD[:, 1:] = 0.05, 0.05 * dim**-0.5
    given.positions_B[:], given.own_weight_B[:], given.weights_B[:] = 0, -1.0, 1.0
    stored = Stored.of(given, SGD(8_000.0))
    before = stored.rows.clone()
    gradient = stored.update(given)
    assert (gradient.abs().amax(1) * 8_000.0 > torch.finfo(torch.float16).max).all()
    assert torch.equal(stored.rows, before)
    assert stored.refused == 2


# Up to four parts of the columns, 64 or 128 wide, keep their gradients.
@pytest.mark.parametrize(
    ("row", "slot", "dim"), [("float8", "int8", 250), ("float8", "float32", 300), ("bfloat16", "int8", 390)]
)
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, weight_decay=0.01), Momentum(0.1, nesterov=True), Adagrad(0.1)], ids=str
)
def test_eight_bits_are_updated_as_by_the_reference(optimizer: RowOptimizerSpec, row: str, slot: str, dim: int) -> None:
    pytest.importorskip("triton")
    dtype = torch.bfloat16 if row == "bfloat16" else torch.float8_e4m3fn
    given = problem(40, 20, dim, normalised=True, dtype=dtype, picked=True)
    assert given.numbers_A is not None
    slots, slot_scales = torch.rand(40, dim) * 0.01, None
    if slot == "int8" and optimizer.slots and optimizer.takes_narrow_slots:
        slots, slot_scales = narrowed(slots, torch.int8)
    slots[given.numbers_A[5]] = 127 if slots.dtype == torch.int8 else 1e38
    if slot_scales is not None:
        slot_scales[given.numbers_A[5], 1] = 2.0**120  # it cannot be stored

    def stored() -> RowArrays:
        return RowArrays(
            rows_LD=given.rows_LD.clone(),
            slots_LS=slots.clone() if optimizer.slots else None,
            updates_L=None,
            row_scales_LK=None if given.scales_LK is None else given.scales_LK.clone(),
            slot_scales_LK=None if slot_scales is None else slot_scales.clone(),
            clock=torch.tensor(77),
            refused=torch.zeros((), dtype=torch.int64),
            first=2**40,
            key=2**63 - 7,
        )

    ours, theirs = stored(), stored()
    head = replace(given.head(torch.float32, shifted=False), rows_LD=ours.rows_LD, scales_LK=ours.row_scales_LK)
    kept, factor = torch.full((head.num_active, 20), torch.nan), torch.tensor(0.7)
    lse = (given.corrected().logsumexp(0) + 0.1).float() * LOG2_E
    with interpreted():
        kernels.exponentials(head, kept, 0, head.num_active)
        terms = kernels.sample_terms(head, given.features_BD, lse, given.own_weight_B, given.weights_B)
        gradient = kernels.row_gradients(head, kept, 0, head.num_active, terms, factor)
        more = {"lr": optimizer.lr, "optimizer": optimizer}
        kernels.update_rows(head, kept, 0, head.num_active, terms, factor, stored=ours, **more)
    update(theirs, given.numbers_A, gradient, scale=torch.tensor(1.0), num_valid=head.count, **more)
    names = ("rows_LD", "slots_LS", "row_scales_LK", "slot_scales_LK")
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine is not None and mine.itemsize > 1:
            torch.testing.assert_close(mine, other)
        elif mine is not None:
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert ours.refused == theirs.refused == int(slot_scales is not None)
    assert not torch.equal(ours.rows_LD.view(torch.uint8), given.rows_LD.view(torch.uint8))
