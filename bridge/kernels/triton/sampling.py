"""Kernels that choose classes: neighbours of labels, then the keyed permutation, with a bitmap of chosen classes.

A bit stands for an id, 32 in a word, so a bitmap of 100 million ids is 12.5 MB and stays in the card's cache.
"""

import triton
import triton.language as tl

DRAWN = 256
"""Ids that a program draws, 4 a thread. All wait for its longest walk, so few are better."""
WORDS = 64
"""Words of the bitmap that a program reads."""
MARKED = 1024
LABELS = 32
RANKS = 32
"""Labels, and places of their lists, that a program reads: a list is one or two cache lines."""
PLACES = 512


@triton.jit
def _mixed(word):
    """The 32-bit finaliser of MurmurHash3."""
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _bits_set(word):
    """Count the set bits of uint32 words."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _passed(left, right, left_key, right_key, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Return two rounds of the network."""
    left ^= _mixed(right ^ left_key) & ((1 << LEFT) - 1)
    right ^= _mixed(left ^ right_key) & ((1 << RIGHT) - 1)
    return left, right


@triton.jit
def mark(ids, bitmap, num_marked, num_given, num_ids, BLOCK: tl.constexpr):
    """Set the bits of ids int64 [num_given] in [0, num_ids); add the number of new ones to ``num_marked``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + at, mask=at < num_given, other=-1)
    is_id = (chosen >= 0) & (chosen < num_ids)
    chosen = tl.where(is_id, chosen, 0).to(tl.int32)
    bit = tl.full(chosen.shape, 1, tl.int32) << (chosen & 31)
    before = tl.atomic_or(bitmap + (chosen >> 5), bit, mask=is_id, sem="relaxed")
    tl.atomic_add(num_marked, tl.sum((is_id & ((before & bit) == 0)).to(tl.int64)), sem="relaxed")


@triton.jit
def _splitmix64(word):
    word += 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _key(base, NUMBER: tl.constexpr):
    """Return the key of round NUMBER, from 1 on."""
    return (_splitmix64(base + NUMBER) >> 32).to(tl.uint32)


@triton.jit(do_not_specialize=["seed"])
def draw(
    bitmap, drawn, num_fresh, count, num_ids, seed, step,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the first ``count`` ids of the permutation, int32; -1 if the bit is set. Count the others by program.

    ``seed`` is splitmix64 of the seed as int64, ``step`` int64 on the device.
    """
    base = _splitmix64(seed.to(tl.int64).to(tl.uint64, bitcast=True) ^ tl.load(step).to(tl.uint64, bitcast=True))
    k1, k2, k3, k4 = _key(base, 1), _key(base, 2), _key(base, 3), _key(base, 4)
    k5, k6, k7, k8 = _key(base, 5), _key(base, 6), _key(base, 7), _key(base, 8)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = at.to(tl.uint32)
    is_out = at < count
    while tl.max(is_out.to(tl.int32)) > 0:
        left, right = value >> RIGHT, value & ((1 << RIGHT) - 1)
        left, right = _passed(left, right, k1, k2, LEFT, RIGHT)
        left, right = _passed(left, right, k3, k4, LEFT, RIGHT)
        left, right = _passed(left, right, k5, k6, LEFT, RIGHT)
        left, right = _passed(left, right, k7, k8, LEFT, RIGHT)
        value = tl.where(is_out, (left << RIGHT) | right, value)
        is_out = is_out & (value >= num_ids.to(tl.uint32))
    number = value.to(tl.int32)
    word = tl.load(bitmap + (number >> 5), mask=at < count, other=-1)
    is_fresh = ((word >> (number & 31)) & 1) == 0
    tl.store(drawn + at, tl.where(is_fresh, number, -1), mask=at < count)
    tl.store(num_fresh + tl.program_id(0), tl.sum(is_fresh.to(tl.int64)))


@triton.jit
def mark_drawn(bitmap, drawn, fresh_ends, num_marked, count, budget, BLOCK: tl.constexpr):
    """Set the bits of the first ``budget`` - ``num_marked`` drawn ids that are not -1."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(drawn + at, mask=at < count, other=-1)
    is_fresh = (number >= 0).to(tl.int32)
    place = tl.load(fresh_ends + program) - tl.sum(is_fresh) + tl.cumsum(is_fresh, 0)
    is_taken = (is_fresh > 0) & (place <= budget - tl.load(num_marked))
    number = tl.where(is_taken, number, 0)
    bit = tl.full(number.shape, 1, tl.int32) << (number & 31)
    tl.atomic_or(bitmap + (number >> 5), bit, mask=is_taken, sem="relaxed")


@triton.jit
def _masked_words(bitmap, word, start, stop):
    """Return words (uint32) of the bitmap without the bits of ids outside [start, stop)."""
    first = word * 32
    bits = tl.load(bitmap + word, mask=first < stop, other=0).to(tl.uint32, bitcast=True)
    low, high = tl.maximum(start - first, 0), tl.maximum(first + 32 - stop, 0)
    every = tl.full(word.shape, 0xFFFFFFFF, tl.uint32)
    bits &= tl.where(low < 32, every << tl.minimum(low, 31).to(tl.uint32), 0)
    return bits & tl.where(high < 32, every >> tl.minimum(high, 31).to(tl.uint32), 0)


@triton.jit
def count_words(bitmap, num_set, start, stop, BLOCK: tl.constexpr):
    """Count the set bits of [start, stop) by program; the first program begins at the word of ``start``."""
    word = (start >> 5) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(num_set + tl.program_id(0), tl.sum(_bits_set(_masked_words(bitmap, word, start, stop))).to(tl.int64))


@triton.jit
def write_ids(bitmap, set_ends, ids, num_written, start, stop, capacity, BLOCK: tl.constexpr):
    """Write the set bits of [start, stop), counted from ``start``, ascending, int64: as many as ``ids`` has room for.

    The last id fills the remaining room, of which each program fills a share.
    """
    word = (start >> 5) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = _masked_words(bitmap, word, start, stop)
    num = _bits_set(bits)
    before = tl.load(set_ends + tl.program_id(0)) - tl.sum(num) + tl.cumsum(num, 0) - num
    place = tl.arange(0, 32)[None, :].to(tl.uint32)
    is_set = ((bits[:, None] >> place) & 1) == 1
    below = bits[:, None] & ((tl.full(place.shape, 1, tl.uint32) << place) - 1)
    at = before[:, None] + _bits_set(below)
    number = word[:, None] * 32 + place.to(tl.int32) - start
    tl.store(ids + at, number.to(tl.int64), mask=is_set & (at < capacity))
    total = tl.minimum(tl.load(set_ends + tl.num_programs(0) - 1), capacity)
    if tl.program_id(0) == 0:
        tl.store(num_written, total)
    for first in range(tl.program_id(0) * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        room = first + tl.arange(0, BLOCK)
        is_behind = (room >= total) & (room < capacity)
        tl.store(ids + room, tl.zeros((BLOCK,), tl.int64) + (stop - start - 1), mask=is_behind)


@triton.jit
def list_candidates(
    labels, offsets, neighbours, said, num_labels, longest, num_lists, LABELS: tl.constexpr, RANKS: tl.constexpr
):
    """Write 1 + the labels and, rank by rank, their neighbours to said [1 + longest, num_labels]; 0 where none is."""
    at = tl.program_id(0) * LABELS + tl.arange(0, LABELS)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    label = tl.load(labels + at, mask=at < num_labels, other=0)
    before = tl.load(labels + at - 1, mask=(at > 0) & (at < num_labels), other=-1)
    here = (at < num_labels) & ((at == 0) | (label != before)) & (label >= 0) & (label < num_lists)
    begin = tl.load(offsets + label, mask=here, other=0)
    end = tl.load(offsets + label + 1, mask=here, other=0)
    place = begin[:, None] + rank[None, :]
    listed = (place < end[:, None]) & (rank < longest)[None, :]
    found = tl.where(listed, tl.load(neighbours + place, mask=listed, other=0) + 1, 0)
    target = (1 + rank).to(tl.int64)[None, :] * num_labels + at[:, None]
    tl.store(said + target, found, mask=(at < num_labels)[:, None] & (rank < longest)[None, :])
    if tl.program_id(1) == 0:
        tl.store(said + at, tl.where(here, label + 1, 0).to(said.dtype.element_ty), mask=at < num_labels)


@triton.jit
def first_places(sorted_ids, order, in_turn, num, PLACES: tl.constexpr):
    """Write 1 at the place, in ``order``, of the first of equal ``sorted_ids`` above 0, else 0."""
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    here = at < num
    number = tl.load(sorted_ids + at, mask=here, other=0)
    before = tl.load(sorted_ids + at - 1, mask=here & (at > 0), other=0)
    place = tl.load(order + at, mask=here, other=0)
    tl.store(in_turn + place, ((number > 0) & (number != before)).to(tl.int32), mask=here)


@triton.jit
def select_nearest(
    said, in_turn, ends, given, num, num_labels, budget, num_classes, NEAR: tl.constexpr, PLACES: tl.constexpr
):
    """Write the classes at the first places in turn: all labels and a part of the budget; num_classes elsewhere."""
    at = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    here = at < num
    num_distinct = tl.load(ends + num_labels - 1)
    share = (budget - num_distinct).to(tl.float64) * tl.full((), NEAR, tl.float64)
    whole = share.to(tl.int64)  # truncates; share is at least 0
    rest = share - whole.to(tl.float64)
    is_up = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    num_near = num_distinct + whole + is_up.to(tl.int64)
    is_taken = (tl.load(in_turn + at, mask=here, other=0) > 0) & (tl.load(ends + at, mask=here, other=0) <= num_near)
    number = tl.load(said + at, mask=here, other=0).to(tl.int64) - 1
    tl.store(given + at, tl.where(is_taken, number, num_classes), mask=here)
