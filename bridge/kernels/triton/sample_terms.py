"""Kernels of ``bridge/kernels/sample_terms.py``, whose names they share; one program for each sample, or for a block.

Legend: b sample, d columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from geartrain.bridge.kernels.triton.row_step import widened

_NORM_FLOOR = tl.constexpr(1e-12)
_COS_LIMIT = tl.constexpr(1.0 - 1e-6)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_LOGIT = tl.constexpr(-1e37)
_TINY = tl.constexpr(2.0**-126)


def row_options(dim: int) -> dict[str, Any]:
    """Return the options of a kernel with one row by program."""
    return {"WIDTH": max(16, triton.next_power_of_2(dim)), "num_warps": 4 if dim <= 2048 else 8}


@triton.jit
def _counted(label, num_classes, ignored):
    """Return whether a label counts, and the number that says so."""
    good = (label >= 0) & (label < num_classes)
    count = tl.where(good, 1.0, float("nan"))
    if ignored is not None:
        good = good & (label != ignored)
        count = tl.where(label == ignored, 0.0, count)
    return good, count


@triton.jit
def prepare_labels(
    labels, settled, counts, num_counted, divisor, rank_divisor, positions, num, num_classes, ignored, first, num_local,
    num_ranks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    largest = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    num_good = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num, BLOCK):
        b = start + tl.arange(0, BLOCK)
        label = tl.load(labels + b, mask=b < num, other=-1)
        good, count = _counted(label, num_classes, ignored)
        largest = tl.maximum(largest, tl.where(good, label, 0))
        total += tl.where(b < num, count, 0.0)
        num_good += tl.where(good, 1.0, 0.0)
    stand_in = tl.max(largest, 0)
    tl.store(num_counted, tl.sum(total, 0))
    whole = tl.maximum(tl.sum(num_good, 0), 1.0)
    tl.store(divisor, whole)
    tl.store(rank_divisor, whole / num_ranks)
    for start in range(0, num, BLOCK):
        b = start + tl.arange(0, BLOCK)
        label = tl.load(labels + b, mask=b < num, other=-1)
        good, count = _counted(label, num_classes, ignored)
        row = label - first
        is_here = good & (row >= 0) & (row < num_local)
        tl.store(settled + b, tl.where(good, label, stand_in), mask=b < num)
        tl.store(counts + b, count, mask=b < num)
        tl.store(positions + b, tl.where(is_here, row, -1), mask=b < num)


@triton.jit
def find_rows(wanted, numbers, count, out, num, num_rows, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Find each wanted row by binary search: the number of rows below it, bit by bit from the highest."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(wanted + b, mask=b < num, other=-1)
    limit = num_rows
    if count is not None:
        limit = tl.load(count).to(tl.int32)
    found = tl.zeros((BLOCK,), tl.int32)
    for bit in range(BITS):
        place = found + (1 << (BITS - 1 - bit))
        below = tl.load(numbers + place - 1, mask=place <= limit, other=9223372036854775807) < row
        found = tl.where(below, place, found)
    is_here = (row >= 0) & (found < limit)
    is_here = is_here & (tl.load(numbers + found, mask=found < limit, other=-1) == row)
    tl.store(out + b, tl.where(is_here, found, -1).to(tl.int64), mask=b < num)


@triton.jit
def sampled_weight(labels, out, num, num_active, num_live_classes, BLOCK: tl.constexpr):
    """Count distinct labels, which are sorted: each that differs from the one before; write the weight."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num, BLOCK):
        b = start + tl.arange(0, BLOCK)
        label = tl.load(labels + b, mask=b < num, other=0)
        before = tl.load(labels + b - 1, mask=(b > 0) & (b < num), other=-1)
        total += tl.where((b < num) & ((b == 0) | (label != before)), 1, 0)
    positive = tl.sum(total, 0)
    left = tl.maximum(num_active - positive, 1).to(tl.float32)
    weight = tl.log2((num_live_classes - positive).to(tl.float32) / left)
    tl.store(out, tl.where(positive < num_active, weight, 0.0))


@triton.jit
def prepare_features(features, counts, out, inverse, queries, factor, DIM: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < DIM
    values = tl.load(features + b * DIM + d, mask=inside, other=0.0).to(tl.float32)
    if counts is not None:
        values = tl.where(tl.load(counts + b) == 1.0, values, 0.0)
    if inverse is not None:
        factor_b = 1.0 / tl.maximum(tl.sqrt(tl.sum(values * values, 0)), _NORM_FLOOR)
        tl.store(inverse + b, factor_b)
        values *= factor_b
    tl.store(out + b * DIM + d, values, mask=inside)
    tl.store(queries + b * DIM + d, (values * factor).to(queries.dtype.element_ty), mask=inside)


@triton.jit
def own_cosines(
    rows, scales, numbers, inverse, positions, features, out, cosines, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < DIM
    position = tl.load(positions + b)
    place = tl.maximum(position, 0)
    row = place
    if numbers is not None:
        row = tl.load(numbers + place, mask=position >= 0, other=0)  # a rank may have no rows
    values = widened(tl.load(rows + row * DIM + d, mask=inside & (position >= 0), other=0), rows.dtype.element_ty)
    if scales is not None:
        values *= tl.load(scales + row, mask=position >= 0, other=0.0).to(tl.float32)
    if inverse is not None:
        values *= tl.load(inverse + place, mask=position >= 0, other=0.0)
    tl.store(out + b * DIM + d, values, mask=inside)
    feature = tl.load(features + b * DIM + d, mask=inside, other=0.0)
    tl.store(cosines + b, tl.sum(values * feature, 0))


@triton.jit
def losses(
    cosines, sums, joint, shifts, counts, out, lse2, target_weights, coefficients, num, middle, scale, cos_m, sin_m,
    m3,
    HAS_MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num
    cos = tl.load(cosines + b, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(sums + b, mask=inside, other=1.0).to(tl.float64)
    # Where only the target is active the shift is below every logit, and the target may lie far below 0.
    top_others = tl.full((BLOCK,), middle, tl.float32)
    shift = top_others
    if joint is not None:
        top_others = tl.load(joint + b, mask=inside, other=0.0)
        shift = tl.load(shifts + b, mask=inside, other=0.0)
    top_others = tl.where(others == 0.0, _NO_LOGIT, top_others)
    shift = tl.where(others == 0.0, _NO_LOGIT, shift)
    logit = cos
    by_cos = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_MARGIN:
        # cos_m and sin_m are those of m2. ψ(θ + m2), θ + m2 in [0, 2π): cos up to π and −cos − 2 beyond; by cos θ it
        # grows by |sin(θ + m2)| / sin θ.
        clamped = tl.minimum(tl.maximum(cos, -_COS_LIMIT), _COS_LIMIT)
        sin = tl.sqrt(1.0 - clamped * clamped)
        turned = clamped * cos_m - sin * sin_m
        slope = tl.abs(sin * cos_m + clamped * sin_m) / sin
        is_angle = sin_m != 0.0
        is_past = is_angle & (clamped < -cos_m)
        value = tl.where(is_angle, tl.where(is_past, -turned - 2.0, turned), cos)
        logit = scale * (value - m3)
        by_cos = scale * tl.where(is_angle, tl.where(cos == clamped, slope, 0.0), 1.0)
    target2 = logit * _LOG2_E
    top = tl.maximum(top_others, target2)
    rest = others * tl.exp2(top_others - top).to(tl.float64)
    total = rest + tl.exp2(target2 - top).to(tl.float64)
    lse = (top.to(tl.float64) + tl.log2(total)).to(tl.float32)
    # Not from the rounded logarithm: that is off by 3e-5 at 900, and so would the sum of probabilities be.
    loss = ((top - target2).to(tl.float64) + tl.log2(total)).to(tl.float32) / _LOG2_E
    if counts is not None:
        loss *= tl.load(counts + b, mask=inside, other=0.0)
    tl.store(out + b, loss, mask=inside)
    tl.store(lse2 + b, lse, mask=inside)
    tl.store(target_weights + b, (-rest / total).to(tl.float32) * by_cos / scale, mask=inside)
    tl.store(coefficients + b, (tl.exp2(shift - top).to(tl.float64) / total).to(tl.float32), mask=inside)


@triton.jit
def scale_sums(sums, shifts, tops, cosines, out, num, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num
    values = tl.load(sums + b, mask=inside, other=0.0).to(tl.float64)
    if tops is not None:
        top = tl.load(tops + b, mask=inside, other=0.0)
        base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        values *= tl.exp2(tl.load(shifts + b, mask=inside, other=0.0) - base).to(tl.float64)
    tl.store(out + b, values, mask=inside)
    tl.store(out + num + b, tl.load(cosines + b, mask=inside, other=0.0).to(tl.float64), mask=inside)


@triton.jit
def finish_gradient(
    gradient, own, coefficients, own_weights, features, inverse, counts, num_samples, num_parts, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the sum of the parts in place of the first."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < DIM
    values = tl.load(gradient + b * DIM + d, mask=inside, other=0.0)
    for part in range(1, num_parts):
        at = tl.cast(part, tl.int64) * num_samples + b
        values += tl.load(gradient + at * DIM + d, mask=inside, other=0.0)
    if own is not None:
        values *= tl.load(coefficients + b)
        values += tl.load(own + b * DIM + d, mask=inside, other=0.0) * tl.load(own_weights + b)
    values *= scale
    if inverse is not None:
        feature = tl.load(features + b * DIM + d, mask=inside, other=0.0)
        values = (values - feature * tl.sum(values * feature, 0)) * tl.load(inverse + b)
    if counts is not None:
        values = tl.where(tl.load(counts + b) == 1.0, values, 0.0)
    tl.store(gradient + b * DIM + d, values, mask=inside)


@triton.jit
def _upstream_of(upstream, ends, b, num, num_ranks, BLOCK: tl.constexpr):
    """Return the upstream gradient of each sample, or of its rank."""
    at = b
    if ends is not None:
        at = tl.zeros((BLOCK,), tl.int32)
        for rank in range(num_ranks):
            at += (b >= tl.load(ends + rank)).to(tl.int32)
    return tl.load(upstream + at, mask=b < num, other=0.0).to(tl.float32)


@triton.jit
def row_factors(
    upstream, ends, num_counted, lse2, target_weights, made_factor, weights, checksum, num, num_ranks, scale,
    OF_SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write all samples' factors in one program. A maximum ignores NaN, so non-finite values are added to a factor."""
    times = scale
    check = 0.0
    if num_counted is not None:
        check = tl.load(num_counted)
        if not OF_SAMPLES:
            times = scale / tl.where(check < 1.0, 1.0, check)
    total = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num, BLOCK):
        b = start + tl.arange(0, BLOCK)
        total += tl.load(lse2 + b, mask=b < num, other=0.0) * tl.load(target_weights + b, mask=b < num, other=0.0)
        if weights is not None:
            value = _upstream_of(upstream, ends, b, num, num_ranks, BLOCK)
            largest = tl.maximum(largest, tl.abs(value))
            total += value * 0.0
    if weights is None:
        made = tl.load(upstream).to(tl.float32) * times
    else:
        most = tl.max(largest, 0)
        made = most * times
        for start in range(0, num, BLOCK):
            b = start + tl.arange(0, BLOCK)
            value = _upstream_of(upstream, ends, b, num, num_ranks, BLOCK)
            tl.store(weights + b, value / tl.maximum(most, _TINY), mask=b < num)
    tl.store(made_factor, made)
    tl.store(checksum, made + tl.sum(total, 0) + check)
