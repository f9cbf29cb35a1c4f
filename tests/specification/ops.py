"""What the kernels compute, in plain numpy: the specification that the tests hold them to, bit by bit where marked so.

Shapes: N ids, D width of a row. Nothing here is fast.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.specs import Constant, Ids, Initializer, Normal

U32, U64 = np.uint32, np.uint64
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
_LOW_32 = U64(0xFFFFFFFF)


def splitmix64(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit integers (Steele, Lea, Flood, OOPSLA 2014). Exact."""
    x = np.atleast_1d(np.asarray(values)).astype(U64) + U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def bucket_of(ids: Ids, dense: bool) -> Ids:
    """Return each id's bucket in [0, 4096). Exact."""
    return ids & 4095 if dense else (splitmix64(ids) >> U64(52)).astype(np.int64)


def philox4x32(key: tuple[int, int], counters: Words, rounds: int = 10) -> Words:
    """Run Philox4x32 on counters [K, 4] and return words [K, 4] (Salmon et al., SC 2011). Exact."""
    x0, x1, x2, x3 = (counters[:, i].astype(U64) for i in range(4))
    key0, key1 = key
    for _ in range(rounds):
        product0, product1 = x0 * U64(0xD2511F53), x2 * U64(0xCD9E8D57)
        x0, x1 = (product1 >> U64(32)) ^ x1 ^ U64(key0), product1 & _LOW_32
        x2, x3 = (product0 >> U64(32)) ^ x3 ^ U64(key1), product0 & _LOW_32
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return np.stack([x0, x1, x2, x3], axis=1).astype(U32)


def words_of_row(seed: int, table_hash: int, row_id: int, dim: int) -> Words:
    """Return the random word of each column [D]: key = seed, counter = (id low, id high, column / 4, table). Exact."""
    blocks = -(-dim // 4)
    counters = np.zeros((blocks, 4), U32)
    counters[:, 0], counters[:, 1] = row_id % 2**32, row_id >> 32
    counters[:, 2], counters[:, 3] = np.arange(blocks), table_hash
    return philox4x32((seed % 2**32, seed >> 32), counters).reshape(-1)[:dim]


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_ARTANH = tuple(1.0 / k for k in range(1, 22, 2))
# fmt: off
_CENTRAL_TOP = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)
_CENTRAL_BOTTOM = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)
_TAIL_TOP = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)
_TAIL_BOTTOM = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)
# fmt: on


def log(x: Doubles) -> Doubles:
    """Natural logarithm of normal doubles in (0, 1) from + - * / alone. Exact in its bits, right to about 1e-16."""
    bits = x.view(np.int64)
    shifted = bits - _SQRT_HALF_BITS
    m = (bits - (shifted >> 52 << 52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    return (shifted >> 52).astype(np.float64) * 0.6931471805599453 + 2.0 * s * _polynomial(_ARTANH, s * s)


def inverse_normal_cdf(words: Words) -> Doubles:
    """Return the standard normal quantile of (word + 1/2) / 2^32 (Wichura, AS 241, PPND16). Exact in its bits."""
    q = (words.astype(np.float64) + 0.5) * 2.0**-32 - 0.5
    r = 0.180625 - q * q
    central = q * _polynomial(_CENTRAL_TOP, r) / _polynomial(_CENTRAL_BOTTOM, r)
    r = np.sqrt(-log(0.5 - np.abs(q))) - 1.6
    tail = _polynomial(_TAIL_TOP, r) / _polynomial(_TAIL_BOTTOM, r)
    return np.where(np.abs(q) <= 0.425, central, np.where(q < 0, -tail, tail))


def initial_row(initializer: Initializer, seed: int, table_hash: int, row_id: int, dim: int) -> Floats:
    """Return the float32 value [D] of a row nobody wrote; the storage type rounds it once more. Exact."""
    if isinstance(initializer, Constant):
        return np.full(dim, initializer.value, np.float32)
    words = words_of_row(seed, table_hash, row_id, dim)
    if isinstance(initializer, Normal):
        return (initializer.mean + initializer.std * inverse_normal_cdf(words)).astype(np.float32)
    low, high = initializer.low, initializer.high
    values = (low + (high - low) * (words.astype(np.float64) * 2.0**-32)).astype(np.float32)
    below = (
        np.float32(high) if float(np.float32(high)) < high else np.nextafter(np.float32(high), np.float32(-math.inf))
    )
    return np.where(values.astype(np.float64) >= high, max(below, np.float32(low)), values)


def merge_duplicates(ids: Ids, rows: npt.NDArray[Any]) -> tuple[Ids, Ids, Floats]:
    """Return distinct ids by first appearance, each id's place among them, and float32 sums in their order. Exact."""
    place: dict[int, int] = {}
    inverse = np.array([place.setdefault(i, len(place)) for i in ids.tolist()], np.int64)
    sums: dict[int, Floats] = {}
    for at, row in zip(inverse.tolist(), rows.astype(np.float32), strict=True):
        sums[at] = sums[at] + row if at in sums else row
    stacked = np.stack(list(sums.values())) if sums else np.empty((0, rows.shape[1]), np.float32)
    return np.array(list(place), np.int64), inverse, stacked


def route(ids: Ids, bucket_to_shard: npt.NDArray[np.uint16], dense: bool, num_shards: int) -> tuple[Ids, Ids]:
    """Return the order that groups ids by shard, stably, and the count of each shard. Exact."""
    shards = bucket_to_shard[bucket_of(ids, dense)]
    return np.argsort(shards, kind="stable"), np.bincount(shards, minlength=num_shards).astype(np.int64)


def _mix(x: Words) -> Words:
    x = (x ^ (x >> U32(16))) * U32(0x85EBCA6B)
    x = (x ^ (x >> U32(13))) * U32(0xC2B2AE35)
    return x ^ (x >> U32(16))


def _permute(values: Ids, bits: int, keys: Words) -> Ids:
    """One pass of the Feistel network over [0, 2^bits)."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = (values >> right_bits).astype(U32), (values & (2**right_bits - 1)).astype(U32)
    for i in range(0, len(keys), 2):
        left = left ^ (_mix(right ^ keys[i]) & U32(2**left_bits - 1))
        right = right ^ (_mix(left ^ keys[i + 1]) & U32(2**right_bits - 1))
    joined: Ids = left.astype(np.int64) << right_bits | right.astype(np.int64)
    return joined


def sample_permutation(num_ids: int, count: int, seed: int, step: int) -> Ids:
    """Return the first ``count`` values of a keyed permutation of [0, num_ids). Exact.

    An unbalanced Feistel network of 8 rounds over the smallest 2^bits >= num_ids, walked until the value is below
    ``num_ids`` (Black and Rogaway, CT-RSA 2002). Left half: floor(bits / 2) bits. Round function: MurmurHash3's 32-bit
    finaliser of half XOR key. Key r = splitmix64(splitmix64(splitmix64(seed) XOR step) + r) >> 32 for r = 1 … 8.
    """
    base = splitmix64(splitmix64(np.array([seed % 2**64], U64)) ^ U64(step % 2**64))
    keys = (splitmix64(base + np.arange(1, 9, dtype=U64)) >> U64(32)).astype(U32)
    bits = (num_ids - 1).bit_length()
    values = _permute(np.arange(count), bits, keys)
    while (outside := np.flatnonzero(values >= num_ids)).size:
        values[outside] = _permute(values[outside], bits, keys)
    return values


def select_neighbours(
    offsets: Ids, neighbours: npt.NDArray[Any], labels: Ids, budget: int, seed: int, step: int
) -> Ids:
    """Return the active classes for ``labels``, rising. Exact.

    The distinct labels are always chosen. Then rank 0 of every distinct label, labels rising, rank 1 of every one, …,
    what is chosen already left out, until ``budget`` are chosen; then the first ids of the keyed permutation under
    (seed, step) that are not chosen yet.
    """
    num_classes = len(offsets) - 1
    distinct = np.unique(labels).tolist()
    budget = max(min(budget, num_classes), len(distinct))
    lists = [neighbours[offsets[label] : offsets[label + 1]].tolist() for label in distinct]
    longest = max(map(len, lists), default=0)
    by_rank = [ids[rank] for rank in range(longest) for ids in lists if rank < len(ids)]
    sampled = sample_permutation(num_classes, num_classes, seed, step).tolist()
    chosen = dict.fromkeys(distinct)
    for class_id in (*by_rank, *sampled):
        if len(chosen) >= budget:
            break
        chosen[class_id] = None
    return np.array(sorted(chosen), np.int64)


_PARTIAL_SUMS = 16


def _dots(a: Doubles, b: Doubles) -> Doubles:
    """Sum a * b [..., D] over D as the exact scores are: column d into sum d mod 16, the sums in pairs. Exact."""
    products = a * b
    whole = -(-products.shape[-1] // _PARTIAL_SUMS) * _PARTIAL_SUMS
    padded = np.zeros((*products.shape[:-1], whole))
    padded[..., : products.shape[-1]] = products
    sums = np.zeros((*products.shape[:-1], _PARTIAL_SUMS))
    for start in range(0, whole, _PARTIAL_SUMS):
        sums += padded[..., start : start + _PARTIAL_SUMS]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    total: Doubles = sums[..., 0]
    return total


def nearest_neighbours(rows: Floats, k: int) -> Ids:
    """Return the min(k, C - 1) nearest others [C, .] of each row [C, D] by cosine, ties by rising id. Exact.

    Rows are divided by their length in double and rounded to float32 (a row of zeros stays); products of these are
    exact in double.
    """
    wide = rows.astype(np.float64)
    lengths = np.sqrt(_dots(wide, wide))
    unit = (wide / np.where(lengths == 0, 1, lengths)[:, None]).astype(np.float32).astype(np.float64)
    scores = np.stack([_dots(row, unit) for row in unit])
    np.fill_diagonal(scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")
    return order[:, : min(k, len(rows) - 1)]
