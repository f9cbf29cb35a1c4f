"""Look-ups and insertions of 64-bit ids in buckets of 128 entries: each a digest (1 to 255; 0: empty) and a slot.

Each kernel ends before the next one starts, and only ``insert`` writes: a search sees complete buckets. An id's key is
its table (key >> bits), with lower bits that are equal for equal ids of a table; ``none`` is the key of no id. Each
table has 8 numbers: addresses of ids, digests, slots and fill; number of buckets (0: no hash table); address of its
count of ids; start and end of its flags.
"""

import triton
import triton.language as tl

FOUND = 32
"""Ids that a program looks up: 8 threads read the digests of one id."""
INSERTED = 256
_NO_ID = tl.constexpr(-(2**63))
_BUCKET = tl.constexpr(128)
_SLOTS = tl.constexpr(96)


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
    """Return the bucket, int64, where the search for an id starts, and its digest, uint8."""
    word = _hash(id)
    bucket = word.to(tl.int64) & (num_buckets - 1)
    return bucket, tl.maximum((word >> 56).to(tl.int32), 1).to(tl.uint8)


@triton.jit
def find(
    tables, key_N, ids_N, like_digests, like_slots, found_N,
    num_ids, bits, none,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slot of each id in its table, int64; -1: unknown; -2: not asked for."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_N + at, mask=at < num_ids, other=none).to(tl.int64)
    id = tl.load(ids_N + at, mask=at < num_ids, other=0)
    meta = tables + (key >> bits) * 8
    num_buckets = tl.load(meta + 4, mask=key < none, other=0)
    is_asked = num_buckets > 0
    ids_C = tl.load(meta, mask=is_asked, other=0).to(tables.dtype)
    digests = tl.multiple_of(tl.load(meta + 1, mask=is_asked, other=0).to(like_digests.dtype), [128])
    slots = tl.load(meta + 2, mask=is_asked, other=0).to(like_slots.dtype)
    bucket, digest = _home(id, num_buckets)
    places = tl.arange(0, _BUCKET)[None, :]
    slot = tl.full([BLOCK], -1, tl.int32)
    is_out = is_asked.to(tl.int32)
    while tl.max(is_out) > 0:
        line = tl.load(digests[:, None] + bucket[:, None] * _BUCKET + places, mask=is_out[:, None] > 0, other=0)
        is_full = tl.max(tl.where(places == _BUCKET - 1, line, 0).to(tl.int32), 1)
        alike = tl.where(line == digest[:, None], places, _BUCKET)  # no id has digest 0
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
    tl.store(found_N + at, tl.where(is_asked, slot.to(tl.int64), -2), mask=at < num_ids)


@triton.jit
def claim(key_N, ids_N, slots_N, first, claimed_N, num_ids, size, BLOCK: tl.constexpr):
    """Claim a place in ``first`` (int32 [size], all ``num_ids``) for each unknown id, for its first occurrence."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_N + at, mask=at < num_ids, other=0).to(tl.int64)
    id = tl.load(ids_N + at, mask=at < num_ids, other=0)
    is_out = (tl.load(slots_N + at, mask=at < num_ids, other=0) == -1).to(tl.int32)
    place = (((_hash(id) >> 20).to(tl.int64) + key * 2654435761) & (size - 1)).to(tl.int32)
    while tl.max(is_out) > 0:
        expected = tl.where(is_out > 0, num_ids, -1)  # -1 never occurs: finished ids change nothing
        held = tl.atomic_cas(first + place, expected, at, sem="relaxed")
        is_held = (is_out > 0) & (held < num_ids)
        is_same = is_held & (tl.load(ids_N + held, mask=is_held, other=0) == id)
        is_same &= tl.load(key_N + held, mask=is_held, other=0).to(tl.int64) == key
        tl.atomic_min(first + place, at, mask=is_same, sem="relaxed")
        is_out = (is_held & (is_same == 0)).to(tl.int32)
        place = (place + is_out) & (size - 1)
    tl.store(claimed_N + at, place, mask=at < num_ids)


@triton.jit
def mark(
    offsets, place_N, slots_N, first, claimed_N, flags,
    num_ids,
    MAKES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """flags[1 + n] = 1 for ids that get a new slot, in the order of their tables; flags[0] = 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    is_new = tl.load(slots_N + at, mask=is_id, other=0) == -1
    if MAKES:
        place = tl.load(claimed_N + at, mask=is_new, other=0)
        is_new &= tl.load(first + place, mask=is_new, other=-1) == at
    piece = tl.load(place_N + at, mask=is_id, other=0) >> 40
    to = at + tl.load(offsets + piece, mask=is_id, other=0)
    tl.store(flags + 1 + to, is_new.to(tl.int32), mask=is_id)
    tl.store(flags + at, 0, mask=at == tl.where(tl.program_id(0) == 0, 0, -1))


@triton.jit
def _enter(id, slot, is_in, digests, slots, fill, num_buckets):
    """Enter ids, all different and unknown, into an index; some bucket is never full."""
    bucket, digest = _home(id, num_buckets)
    is_out = is_in.to(tl.int32)
    while tl.max(is_out) > 0:
        place = tl.atomic_add(fill + bucket, 1, mask=is_out > 0, sem="relaxed")
        fits = (is_out > 0) & (place < _BUCKET)
        tl.store(digests + bucket * _BUCKET + place, digest, mask=fits)
        tl.store(slots + bucket * _BUCKET + place, slot.to(tl.int32), mask=fits)
        is_out = ((is_out > 0) & (place >= _BUCKET)).to(tl.int32)
        bucket = (bucket + 1) & (num_buckets - 1)


@triton.jit
def insert(
    tables, offsets, key_N, ids_N, place_N, sums, like_digests, like_slots, slots_N, made_N,
    num_ids, bits,
    MAKES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give flagged ids the next free slots of their tables: into ``made_N`` (-1: none) and ``slots_N``.

    With MAKES, enter these ids into the tables.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    piece = tl.load(place_N + at, mask=is_id, other=0) >> 40
    to = sums + at + tl.load(offsets + piece, mask=is_id, other=0)
    count = tl.load(to + 1, mask=is_id, other=0)
    is_new = count > tl.load(to, mask=is_id, other=0)
    key = tl.load(key_N + at, mask=is_new, other=0).to(tl.int64)
    meta = tables + (key >> bits) * 8
    num_buckets = tl.load(meta + 4, mask=is_new, other=1)
    held = tl.load(tl.load(meta + 5, mask=is_new, other=0).to(tables.dtype), mask=is_new, other=0)
    before = tl.load(sums + tl.load(meta + 6, mask=is_new, other=0), mask=is_new, other=0)
    slot = held + (count - before - 1)
    is_new &= slot < num_buckets * _SLOTS
    slot = tl.where(is_new, slot, -1)
    tl.store(made_N + at, slot, mask=is_id)
    tl.store(slots_N + at, slot, mask=is_new)
    if MAKES:
        id = tl.load(ids_N + at, mask=is_new, other=0)
        tl.store(tl.load(meta, mask=is_new, other=0).to(tables.dtype) + slot, id, mask=is_new)
        digests = tl.load(meta + 1, mask=is_new, other=0).to(like_digests.dtype)
        slots = tl.load(meta + 2, mask=is_new, other=0).to(like_slots.dtype)
        fill = tl.load(meta + 3, mask=is_new, other=0).to(like_slots.dtype)
        _enter(id, slot, is_new, digests, slots, fill, num_buckets)


@triton.jit
def finish_inserts(
    tables, key_N, slots_N, first, claimed_N, sums, numbered_N, counts_T,
    num_ids, bits, none, num_tables,
    MAKES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write keys with slots for ids, fill in repeats of new ids, and count the ids of each table."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    key = tl.load(key_N + at, mask=is_id, other=0).to(tl.int64)
    slot = tl.load(slots_N + at, mask=is_id, other=0)
    if MAKES:
        is_again = is_id & (slot == -1)
        place = tl.load(first + tl.load(claimed_N + at, mask=is_again, other=0), mask=is_again, other=0)
        slot = tl.where(is_again, tl.load(slots_N + place, mask=is_again, other=-1), slot)
        tl.store(slots_N + at, slot, mask=is_again)
    numbered = tl.where(slot < 0, none, ((key >> bits) << bits) | slot)
    tl.store(numbered_N + at, tl.where(slot == -2, key, numbered), mask=is_id)
    if MAKES:  # noqa: SIM102 (a constant, and what is not)
        if tl.program_id(0) == 0:
            for table in range(num_tables):
                meta = tables + table * 8
                num_buckets = tl.load(meta + 4)
                if num_buckets > 0:
                    held = tl.load(meta + 5).to(tables.dtype)
                    new = tl.load(sums + tl.load(meta + 7)) - tl.load(sums + tl.load(meta + 6))
                    num = tl.load(held) + new
                    most = num_buckets * _SLOTS
                    tl.store(held, tl.minimum(num, most))
                    tl.store(held + 1, tl.load(held + 1) + tl.maximum(num - most, 0))
                    tl.store(counts_T + table, tl.minimum(num, most))


@triton.jit
def rehash(ids_C, digests, slots, fill, num_ids, num_buckets, BLOCK: tl.constexpr):
    """Enter the ids of slots 0 to ``num_ids`` - 1 into an empty index."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_C + at, mask=at < num_ids, other=_NO_ID)
    _enter(id, at, id != _NO_ID, digests, slots, fill, num_buckets)


@triton.jit
def owner(id, ranks):
    """Return the rank of an id: ``hashing.owners``."""
    word = id.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return (((word ^ (word >> 31)) >> 32).to(tl.int64) * ranks) >> 32
