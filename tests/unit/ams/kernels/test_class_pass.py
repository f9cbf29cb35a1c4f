"""The compiled class pass against its formulas in float64, on every instruction set that this CPU has."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import ops

Floats = npt.NDArray[Any]
FACTOR = 12.0
NO_TARGETS = {"target_rows": np.empty(0, np.int64), "target_samples": np.empty(0, np.int64)}
SHAPES = [(128, 128, 400), (1, 1, 1), (7, 5, 13), (300, 33, 201), (33, 520, 250), (513, 16, 97)]
SEVERAL = [(7, 5, 13, 2), (300, 33, 201, 3), (20, 130, 40, 7), (3, 16, 9, 32)]
"""The last is the number of centers of each class."""
WIDE = [(40, 737, 130), (300, 1024, 100), (20, 2048, 200)]  # of which a tile holds the fewest rows


class Case:
    """One batch of B samples and one chunk of N rows of width D, with what the formulas give for them.

    Of several centers a class each is a row, whose logits are −∞ where another one of its class is nearer.
    """

    def __init__(
        self,
        batch: int,
        dim: int,
        num_classes: int,
        centers: int = 1,
        *,
        normalised: bool,
        shifted: bool,
        seed: int = 0,
        bfloat16: bool = False,
    ) -> None:
        random = np.random.default_rng(seed)
        self.features = random.standard_normal((batch, dim)).astype(np.float32)
        self.features /= np.linalg.norm(self.features, axis=1, keepdims=True)
        num_rows, self.centers = num_classes * centers, centers
        self.normalised, self.bfloat16 = normalised, bfloat16
        for _ in range(
            20
        ):  # until no sample has two centers of a class equally near but for rounding (of width 1: never)
            self.rows = (random.standard_normal((num_rows, dim)) * 0.3).astype(np.float32)
            wide = self.rows.astype(np.float64)
            self.inverse = 1 / np.linalg.norm(wide, axis=1) if normalised else np.ones(num_rows)
            self.unit = wide * self.inverse[:, None]
            self.logits = self.features.astype(np.float64) @ self.unit.T * FACTOR
            nearest = np.sort(self._rounded_logits().reshape(batch, num_classes, centers), axis=2)[:, :, -2:]
            self.is_clear = centers == 1 or bool(np.diff(nearest).min(initial=1) > 1e-5 * FACTOR)
            if self.is_clear:
                break
        self.samples = np.arange(0, batch, 3)
        self.classes = random.integers(num_classes, size=len(self.samples))
        self.shifted = shifted
        chosen = self._chosen()
        self.logits[chosen.repeat(centers, 1) != np.tile(np.arange(centers), num_classes)] = -np.inf
        self.targets = self.classes * centers + chosen[self.samples, self.classes]
        self.target_weight = random.standard_normal(batch).astype(np.float32)

    def _rounded_logits(self) -> Floats:
        """Of rounded operands, where the products are of such."""
        if not self.bfloat16:
            return self.logits
        factors = (self.features * np.float32(FACTOR), (self.rows * self.inverse[:, None].astype(np.float32)))
        query, unit = (factor.astype(ml_dtypes.bfloat16).astype(np.float64) for factor in factors)
        logits: Floats = query @ unit.T
        return logits

    def _chosen(self) -> npt.NDArray[np.int64]:
        """Center of each class [B, C] with the largest logit."""
        logits = self._rounded_logits()
        chosen: npt.NDArray[np.int64] = logits.reshape(len(logits), -1, self.centers).argmax(2)
        return chosen

    def compiled(self, weights: Floats | None = None) -> ops.ClassPass:
        return ops.ClassPass(
            self.features,
            logit_factor=FACTOR,
            normalised=self.normalised,
            bfloat16=self.bfloat16,
            weights=weights,
            centers=self.centers,
        )

    def forward(
        self, *, chunks: int = 1, parts: int = 1, num_kept: int | None = None, threads: int = 1
    ) -> dict[str, Floats | None]:
        """Sums over chunks, one call each; its parts summed up."""
        batch, dim = self.features.shape
        shift = np.full((parts, batch), -1e37, np.float32) if self.shifted else None
        sums = {"sum": np.zeros((parts, batch)), "weighted": np.zeros((parts, batch, dim), np.float32)}
        target_out = np.zeros((batch, dim), np.float32)
        highest = np.full((parts, batch), -1e37, np.float32)
        rows = self.rows.reshape(-1, dim * self.centers)
        kept = np.zeros((len(rows) if num_kept is None else num_kept, batch * self.centers), np.float32)
        compiled = self.compiled()
        for low, high in itertools.pairwise(np.linspace(0, len(rows), chunks + 1).astype(int)):
            here = (self.classes >= low) & (self.classes < high)
            compiled.forward(
                rows[low:high],
                target_rows=self.classes[here] - low,
                target_samples=self.samples[here],
                target_out=target_out,
                shift=shift,
                **sums,
                kept=kept[low:high],
                threads=threads,
                highest=highest,
            )
        largest = highest.max(0)
        highest = np.zeros((1, batch), np.float32) if shift is None else shift.max(0, keepdims=True)
        shrink = np.exp2((0 if shift is None else shift) - highest) * np.ones((parts, 1))
        return {
            "target_out": target_out,
            "shift": highest[0],
            "sum": (sums["sum"] * shrink).sum(0),
            "weighted": (sums["weighted"] * shrink[:, :, None]).sum(0),
            "kept": kept,
            "highest": largest,
        }

    def check_forward(self, out: dict[str, Any]) -> None:
        shift = out["shift"].astype(np.float64) if self.shifted else np.zeros(len(self.features))
        with np.errstate(over="ignore"):  # where all of a sample's rows are targets
            exponentials = np.exp2(self.logits - shift[:, None])
        exponentials[self.samples, self.targets] = 0
        found = out["kept"].copy().reshape(-1, len(self.features))
        num_kept = len(found)
        if self.centers > 1:  # the nearest center of a target is told from the others by a one
            samples, targets = self.samples[self.targets < num_kept], self.targets[self.targets < num_kept]
            assert (found[targets, samples] == 1).all()
            found[targets, samples] = -np.inf if self.shifted else 0
        others = self.logits.copy()
        others[self.samples, self.targets] = -np.inf
        kept = (others.T if self.shifted else exponentials.T)[:num_kept]
        is_target = np.isinf(kept)
        assert np.array_equal(np.isneginf(found), is_target)
        magnitudes = np.abs(self.features) @ np.abs(self.unit.T) * FACTOR
        terms = np.where(is_target, 0, magnitudes.T[:num_kept]) if self.shifted else None
        self.close(np.where(is_target, 0, found), np.where(is_target, 0, kept), terms)
        self.close(out["highest"], np.maximum(others.max(1), np.float32(-1e37)), magnitudes)
        self.close(out["sum"], exponentials.sum(1))
        self.close(out["weighted"], exponentials @ self.unit, exponentials @ np.abs(self.unit))
        close(out["target_out"][self.samples], self.unit[self.targets])

    def close(
        self, found: Floats, expected: Floats, terms: Floats | None = None, *, scale: Floats | None = None
    ) -> None:
        """``terms``: the sums of magnitudes whose sums, with signs, are compared; what rounding is measured by."""
        if self.bfloat16:  # numbers of 8 bits, multiplied by FACTOR and exponentiated
            largest = np.abs(expected if terms is None else terms).max(initial=0)
            np.testing.assert_allclose(found, expected, rtol=0, atol=0.06 * largest + 1e-12)
        else:
            close(found, expected, scale)

    def check_gradient(self, kept: Floats | None, *, threads: int = 1, weights: Floats | None = None) -> None:
        log_sum = np.log2(np.exp2(self.logits).sum(1)).astype(np.float32)
        probabilities = np.exp2(self.logits - log_sum[:, None].astype(np.float64))
        probabilities[self.samples, self.targets] = self.target_weight[self.samples]
        weighted = probabilities if weights is None else probabilities * weights[:, None]
        unit_gradient = weighted.T @ self.features.astype(np.float64)
        expected = 0.5 * self.inverse[:, None] * unit_gradient
        if self.normalised:
            expected -= 0.5 * self.inverse[:, None] * (unit_gradient * self.unit).sum(1, keepdims=True) * self.unit
        rows = self.rows.copy()
        compiled = self.compiled(weights)
        check, squares = compiled.overwrite(
            rows.reshape(-1, self.rows.shape[1] * self.centers),
            target_rows=self.classes,
            target_samples=self.samples,
            log_sum=log_sum,
            target_weight=self.target_weight,
            kept=kept,
            factor=0.5,
            kept_exponentials=not self.shifted,
            threads=threads,
        )
        assert check == 0
        assert squares == pytest.approx(np.square(rows, dtype=np.float64).sum(), rel=1e-5)
        terms = np.abs(weighted).T @ np.abs(self.features)
        self.close(rows, expected, terms * self.inverse[:, None], scale=unit_gradient * self.inverse[:, None])


def close(found: Floats, expected: Floats, scale: Floats | None = None) -> None:
    largest = np.abs(expected if scale is None else scale).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * largest + 1e-12)


def check_all(*, bfloat16: bool = False) -> None:
    for shape in SHAPES + WIDE + SEVERAL:
        for normalised in (True, False):
            for shifted in (True, False):
                case = Case(*shape, normalised=normalised, shifted=shifted, bfloat16=bfloat16)
                out = case.forward()
                case.check_forward(out)
                case.check_gradient(out["kept"])
                case.check_gradient(None, weights=np.linspace(-1, 1, shape[0]).astype(np.float32))


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512", "baseline bfloat16"])
def test_every_instruction_set_follows_the_formulas(instruction_set: str) -> None:
    """Products in bfloat16 below AVX-512 are made without a unit for them."""
    instruction_set, *kind = instruction_set.split()
    if kind and not ops.has_bfloat16_class_pass():
        pytest.skip("without AMX that is what test_products_in_bfloat16_follow_the_formulas does")
    ran = subprocess.run(
        [sys.executable, __file__, *kind],
        env={**os.environ, "GEARTRAIN_ISA": instruction_set},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "the best of this CPU is" in ran.stderr:
        pytest.skip(f"this CPU has no {instruction_set}")
    assert ran.returncode == 0, ran.stderr


def test_products_in_bfloat16_follow_the_formulas() -> None:
    """By the matrix unit where there is one, as everything below."""
    check_all(bfloat16=True)


def test_products_in_bfloat16_are_those_of_rounded_operands() -> None:
    """To the accuracy of float32: nothing else is rounded."""
    case = Case(96, 80, 500, normalised=False, shifted=True, bfloat16=True)
    case.features = case.features.astype(ml_dtypes.bfloat16).astype(np.float32)
    case.rows = case.rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    case.samples = case.targets = case.classes = np.empty(0, np.int64)
    query = (case.features * np.float32(FACTOR)).astype(ml_dtypes.bfloat16).astype(np.float64)
    close(case.forward()["kept"], case.rows.astype(np.float64) @ query.T)


def test_the_part_of_the_targets_is_not_rounded() -> None:
    """It is the largest, and most of it is taken out again: what lies along the row."""
    case = Case(30, 64, 50, normalised=True, shifted=False, bfloat16=True)
    rows = case.rows.copy()
    close_by = 0.999 * case.unit[case.targets] + 0.04 * case.features[case.samples]
    case.features[case.samples] = close_by / np.linalg.norm(close_by, axis=1, keepdims=True)
    case.compiled().overwrite(
        rows,
        target_rows=case.targets,
        target_samples=case.samples,
        log_sum=np.full(30, 1000, np.float32),  # so that the other classes have no part
        target_weight=case.target_weight,
        kept=None,
        factor=1.0,
    )
    unit_gradient = np.zeros_like(case.unit)
    np.add.at(unit_gradient, case.targets, case.target_weight[case.samples, None] * case.features[case.samples])
    along = (unit_gradient * case.unit).sum(1, keepdims=True) * case.unit
    close(rows, case.inverse[:, None] * (unit_gradient - along), scale=case.inverse[:, None] * unit_gradient)


@pytest.mark.skipif(not ops.has_bfloat16_class_pass(), reason="this CPU has no AMX, or may not use it")
def test_the_matrix_unit_is_left_as_it_was_found() -> None:
    import torch  # not where this file is run as a script

    left, right = torch.randn(64, 96).bfloat16(), torch.randn(96, 64).bfloat16()
    before = left @ right  # by the same unit, set up by another library
    case = Case(40, 24, 300, normalised=True, shifted=False, bfloat16=True)
    for _ in range(3):
        case.check_forward(case.forward())
        assert torch.equal(left @ right, before)


@settings(deadline=None, max_examples=120)
@given(
    bfloat16=st.booleans(),
    batch=st.integers(1, 70),
    dim=st.integers(1, 70),
    num_classes=st.integers(1, 260),
    centers=st.integers(1, 4),
    normalised=st.booleans(),
    shifted=st.booleans(),
    chunks=st.integers(1, 5),
    parts=st.integers(1, 9),
    threads=st.integers(1, 4),
    kept=st.floats(0, 1),
)
def test_sums_over_chunks_and_parts_are_those_over_all_rows(
    bfloat16: bool,
    batch: int,
    dim: int,
    num_classes: int,
    centers: int,
    normalised: bool,
    shifted: bool,
    chunks: int,
    parts: int,
    threads: int,
    kept: float,
) -> None:
    if bfloat16 and normalised:  # a unit row may be rounded otherwise here, to another nearest center
        centers = 1
    case = Case(batch, dim, num_classes, centers, normalised=normalised, shifted=shifted, bfloat16=bfloat16)
    assume(case.is_clear)
    out = case.forward(chunks=chunks, parts=parts, num_kept=int(kept * num_classes), threads=threads)
    case.check_forward(out)
    case.check_gradient(out["kept"], threads=threads)


def test_sums_and_gradients_do_not_depend_on_the_number_of_threads() -> None:
    for classes, centers in ((9000, 1), (1900, 3)):
        case = Case(37, 24, classes, centers, normalised=True, shifted=False)  # more rows than are dealt out at a time
        alone, four = (case.forward(parts=16, num_kept=classes // 2, threads=threads) for threads in (1, 4))
        for name, array in alone.items():
            np.testing.assert_array_equal(four[name], array, err_msg=name)
        case.check_gradient(alone["kept"], threads=4)


def test_a_shift_keeps_exponentials_in_range() -> None:
    case = Case(5, 8, 60, normalised=False, shifted=True)
    case.rows *= 3000  # logits beyond what exp2 can hold in float32
    case.unit *= 3000
    case.logits *= 3000
    out = case.forward(chunks=7)
    assert np.isfinite(out["sum"]).all()
    shift = out["shift"]
    assert shift is not None
    others = case.logits.copy()
    others[case.samples, case.targets] = -np.inf
    np.testing.assert_allclose(shift, others.max(1), rtol=1e-5)


def test_kept_exponentials_far_from_one_become_probabilities() -> None:
    random = np.random.default_rng(1)
    rows = random.standard_normal((64, 8)).astype(np.float32)
    feature = rows[:1] / np.linalg.norm(rows[0])  # its cosine with row 0 is 1: a logit of 120, and a sum beyond 2^126
    compiled = ops.ClassPass(feature, logit_factor=120.0, normalised=True)
    kept = np.zeros((64, 1), np.float32)
    sums: dict[str, Any] = {"target_out": np.zeros((1, 8), np.float32), "shift": None, "weighted": None}
    compiled.forward(np.repeat(rows[:1], 64, 0), **NO_TARGETS, **sums, sum=np.zeros((1, 1)), kept=kept)
    settings = {"log_sum": np.full(1, 126.5, np.float32), "target_weight": np.zeros(1, np.float32), "factor": 1.0}
    made, from_kept = (random.standard_normal((64, 8)).astype(np.float32) for _ in range(2))
    from_kept[:] = made
    compiled.overwrite(made, **NO_TARGETS, **settings, kept=np.full((64, 1), 120.0, np.float32))
    compiled.overwrite(from_kept, **NO_TARGETS, **settings, kept=kept, kept_exponentials=True)
    assert np.abs(made).max() > 1e-3
    np.testing.assert_allclose(from_kept, made, rtol=1e-4, atol=1e-7)


def test_what_is_not_finite_shows() -> None:
    case = Case(4, 6, 30, normalised=True, shifted=False)
    case.rows[17, 2] = np.nan
    sums = case.forward()["sum"]
    assert sums is not None
    assert np.isnan(sums).all()
    compiled = ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True)
    zeros = np.zeros(4, np.float32)
    check, _ = compiled.overwrite(case.rows, **NO_TARGETS, log_sum=zeros, target_weight=zeros, kept=None, factor=1.0)
    assert np.isnan(check)


def test_one_row_that_is_not_finite_shows_whichever_thread_meets_it() -> None:
    case = Case(64, 16, 24_000, normalised=True, shifted=False)
    case.rows[-1, 2] = np.inf
    compiled = ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True)
    fine: dict[str, Any] = {"log_sum": np.zeros(64, np.float32), "target_weight": np.zeros(64, np.float32)}
    for _ in range(20):  # whose piece is the last one is a matter of chance
        check, _ = compiled.overwrite(case.rows.copy(), **NO_TARGETS, **fine, kept=None, factor=1.0, threads=3)
        assert np.isnan(check)


def test_sums_of_another_shape_are_refused() -> None:
    case = Case(4, 6, 30, normalised=True, shifted=False)
    compiled = ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True)
    fine: dict[str, Any] = {
        "target_out": np.zeros((4, 6), np.float32),
        "shift": None,
        "sum": np.zeros((2, 4)),
        "weighted": np.zeros((2, 4, 6), np.float32),
        "kept": np.zeros((30, 4), np.float32),
        "threads": 1,
    }
    nothing = {"sum": np.zeros((0, 4)), "weighted": None}
    with pytest.raises(ValueError, match="P >= 1"):
        compiled.forward(case.rows, **NO_TARGETS, **{**fine, **nothing})
    wrong: dict[str, Any] = {
        "sum": np.zeros((2, 5)),
        "weighted": np.zeros((3, 4, 6), np.float32),
        "shift": np.zeros((1, 4), np.float32),
        "kept": np.zeros((31, 4), np.float32),
        "threads": 0,
    }
    several = ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True, centers=3)
    with pytest.raises(ValueError, match="features times centers"):
        several.forward(case.rows, **NO_TARGETS, **fine)
    with pytest.raises(ValueError, match="row_sum must not be given"):
        several.forward(case.rows.reshape(10, 18), **NO_TARGETS, **{**fine, "kept": None}, row_sum=np.zeros((2, 6)))
    for centers in (0, 33):
        with pytest.raises(ValueError, match="centers"):
            ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True, centers=centers)
    compiled.forward(case.rows, **NO_TARGETS, **fine)
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            compiled.forward(case.rows, **NO_TARGETS, **{**fine, name: value})


def test_a_target_outside_the_chunk_is_refused() -> None:
    case = Case(4, 6, 30, normalised=True, shifted=False)
    compiled = ops.ClassPass(case.features, logit_factor=FACTOR, normalised=True)
    zeros, wrong = np.zeros(4, np.float32), {"target_rows": np.array([30]), "target_samples": np.array([0])}
    with pytest.raises(ValueError, match="outside the chunk"):
        compiled.overwrite(case.rows, **wrong, log_sum=zeros, target_weight=zeros, kept=None, factor=1.0)


if __name__ == "__main__":
    check_all(bfloat16="bfloat16" in sys.argv)
