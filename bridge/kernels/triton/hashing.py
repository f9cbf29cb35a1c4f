"""Look-ups and insertions of 64-bit ids in buckets of 128 entries: a digest (1 to 255; 0: none) and a slot each.

Each kernel is over before the next one starts, and only ``insert`` writes: a search sees whole buckets.
"""

import triton
import triton.language as tl

FOUND = 32
"""Ids that a program looks up: 8 threads read the digests of one."""
INSERTED = 256
_NO_ID = tl.constexpr(-(2**63))
_BUCKET = tl.constexpr(128)


@triton.jit
def _hash(id):
    """The 64-bit finaliser of MurmurHash3."""
    word = id.to(tl.uint64, bitcast=True)
    word ^= word >> 33
    word *= 0xFF51AFD7ED558CCD
    word ^= word >> 33
    word *= 0xC4CEB9FE1A85EC53
    return word ^ (word >> 33)


@triton.jit
def _home(id, num_buckets):
    """The bucket, int64, where an id is first looked for, and its digest, uint8."""
    word = _hash(id)
    bucket = (word & (num_buckets - 1)).to(tl.int64)
    return bucket, tl.maximum((word >> 56).to(tl.int32), 1).to(tl.uint8)


@triton.jit
def find(ids_N, ids_C, digests, slots, found_N, num_ids, num_buckets, BLOCK: tl.constexpr):
    """The slot of each id, int64; -1: unknown."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_N + at, mask=at < num_ids, other=_NO_ID)
    bucket, digest = _home(id, num_buckets)
    places = tl.arange(0, _BUCKET)[None, :]
    slot = tl.full([BLOCK], -1, tl.int32)
    is_out = (id != _NO_ID).to(tl.int32)
    while tl.max(is_out) > 0:
        line = tl.load(digests + bucket[:, None] * _BUCKET + places, mask=is_out[:, None] > 0, other=0)
        is_full = tl.max(tl.where(places == _BUCKET - 1, line, 0).to(tl.int32), 1)
        alike = tl.where(line == digest[:, None], places, _BUCKET)  # digests of 0 are no id's
        place = tl.min(alike, 1)
        while tl.min(place) < _BUCKET:
            is_alike = place < _BUCKET
            held = tl.load(slots + bucket * _BUCKET + place, mask=is_alike, other=0)
            is_hit = is_alike & (tl.load(ids_C + held, mask=is_alike, other=_NO_ID) == id)
            slot = tl.where(is_hit, held, slot)
            alike = tl.where((alike <= place[:, None]) | is_hit[:, None], _BUCKET, alike)
            place = tl.min(alike, 1)
        is_out = ((is_out > 0) & (slot < 0) & (is_full > 0)).to(tl.int32)
        bucket = (bucket + 1) & (num_buckets - 1)
    tl.store(found_N + at, slot.to(tl.int64), mask=at < num_ids)


@triton.jit
def claim(ids_N, is_new_N, first, place_N, num_ids, size, BLOCK: tl.constexpr):
    """A place for each new id in ``first`` (int32 [size], before: ``num_ids``); there, where the id first occurs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_N + at, mask=at < num_ids, other=0)
    is_out = tl.load(is_new_N + at, mask=at < num_ids, other=0).to(tl.int32)
    place = ((_hash(id) >> 20) & (size - 1)).to(tl.int32)
    while tl.max(is_out) > 0:
        expected = tl.where(is_out > 0, num_ids, -1)  # -1 is nowhere: those that are done change nothing
        held = tl.atomic_cas(first + place, expected, at, sem="relaxed")
        is_held = (is_out > 0) & (held < num_ids)
        is_same = is_held & (tl.load(ids_N + held, mask=is_held, other=0) == id)
        tl.atomic_min(first + place, at, mask=is_same, sem="relaxed")
        is_out = (is_held & (is_same == 0)).to(tl.int32)
        place = (place + is_out) & (size - 1)
    tl.store(place_N + at, place.to(tl.int64), mask=at < num_ids)


@triton.jit
def insert(ids_N, slots_N, ids_C, digests, slots, fill, num_ids, num_buckets, BLOCK: tl.constexpr):
    """Enter ids, all different and unknown, whose slots are not -1; some bucket is never full."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_N + at, mask=at < num_ids, other=0)
    slot = tl.load(slots_N + at, mask=at < num_ids, other=-1)
    is_out = (slot >= 0).to(tl.int32)
    tl.store(ids_C + slot, id, mask=is_out > 0)
    bucket, digest = _home(id, num_buckets)
    while tl.max(is_out) > 0:
        place = tl.atomic_add(fill + bucket, 1, mask=is_out > 0, sem="relaxed")
        is_in = (is_out > 0) & (place < _BUCKET)
        tl.store(digests + bucket * _BUCKET + place, digest, mask=is_in)
        tl.store(slots + bucket * _BUCKET + place, slot.to(tl.int32), mask=is_in)
        is_out = ((is_out > 0) & (place >= _BUCKET)).to(tl.int32)
        bucket = (bucket + 1) & (num_buckets - 1)


@triton.jit
def owner(id, ranks):
    """``hashing.owners``."""
    word = id.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return (((word ^ (word >> 31)) >> 32).to(tl.int64) * ranks) >> 32
