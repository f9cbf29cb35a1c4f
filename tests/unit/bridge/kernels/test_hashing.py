"""The hash table: a dict that hands out numbers, by tensor operations and by kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.kernels.hashing import NO_ID, HashTable, owners
from geartrain.bridge.kernels.launch import interpreted

CPU = torch.device("cpu")
_LONG = 2**64 - 1
FEW = st.integers(-4, 40)
IDS = st.integers(NO_ID, 2**63 - 1) | st.sampled_from([NO_ID, NO_ID + 1, 2**63 - 1, 0, -1]) | FEW


def unhashed(word: int) -> int:
    """The id whose hash (the 64-bit finaliser of MurmurHash3) is ``word``."""
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        word = ((word ^ (word >> 33)) * pow(factor, -1, 2**64)) & _LONG
    word ^= word >> 33
    return word - 2**64 if word >= 2**63 else word


def numbered(known: dict[int, int], ids: list[int], capacity: int) -> list[int]:
    """What a table with the ids of ``known`` answers, which learns the new ones."""
    for number in ids:
        if number != NO_ID and len(known) < capacity:
            known.setdefault(number, len(known))
    return [known.get(number, -1) for number in ids]


def require(table: HashTable, known: dict[int, int]) -> None:
    """That it holds the ids of ``known`` and no others."""
    assert int(table.num_ids) == len(known)
    assert table.ids_C.tolist() == [*known, *[NO_ID] * (table.capacity - len(known))]
    asked = torch.tensor([*known, NO_ID, 2**40 + 1, -(2**50)], device=table.ids_C.device)
    assert table.find(asked).tolist() == [*known.values(), -1, *(known.get(i, -1) for i in (2**40 + 1, -(2**50)))]


def compare(batches: list[list[int]], *, makes_room: bool) -> None:
    table, known = HashTable(1, CPU), {}
    assert table.capacity == 96
    for ids in batches:
        asked = torch.tensor(ids, dtype=torch.int64)
        if makes_room:
            table.reserve(len(ids))
        refused = int(table.num_refused)
        slots = table.find_or_insert(asked)
        assert slots.dtype == torch.int64 and slots.tolist() == numbered(known, ids, table.capacity)
        lost = {number for number in ids if number not in known and number != NO_ID}
        assert int(table.num_refused) - refused == len(lost) and not (lost and makes_room)
    require(table, known)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(IDS, max_size=150), max_size=5), makes_room=st.booleans())
def test_ids_are_numbered_as_they_first_occur(batches: list[list[int]], makes_room: bool) -> None:
    compare(batches, makes_room=makes_room)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=st.lists(st.lists(IDS, max_size=150), max_size=3), makes_room=st.booleans())
def test_a_kernel_numbers_them_so_too(batches: list[list[int]], makes_room: bool) -> None:
    pytest.importorskip("triton")
    with interpreted():
        compare(batches, makes_room=makes_room)


def test_a_larger_batch_has_the_same_slots_on_a_device(kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    table, known = HashTable(600, kernel_device), {}
    for _ in range(3):
        ids = torch.randint(-300, 300, (700,), generator=generator) * 2**33
        table.reserve(len(ids))
        assert table.find_or_insert(ids.to(kernel_device)).tolist() == numbered(known, ids.tolist(), table.capacity)
    require(table, known)


@pytest.mark.parametrize("digest", [0, 200])
def test_ids_of_the_same_bucket_and_digest_go_on_to_others(kernel_device: torch.device, digest: int) -> None:
    ids = [unhashed(digest << 56 | number << 10 | 3) for number in range(160)]
    table = HashTable(384, kernel_device)  # 4 buckets: the last one, and then the first one
    asked = torch.tensor(ids, device=kernel_device)
    assert table.find_or_insert(asked[:150]).tolist() == [*range(150)]
    some = [0, 1, 126, 127, 128, 149, 150, 159]
    assert table.find(asked[some]).tolist() == [*some[:-2], -1, -1]
    table.grow(800)
    assert table.find(asked[some]).tolist() == [*some[:-2], -1, -1]
    assert table.find_or_insert(asked[130:].flip(0)).tolist() == [*range(150, 160), *range(149, 129, -1)]


def test_a_full_table_refuses_the_last_ids_and_takes_them_once_grown(kernel_device: torch.device) -> None:
    table = HashTable(90, kernel_device)
    ids = torch.arange(1000, 1100, device=kernel_device)
    again = torch.cat([ids, ids[90:]])
    assert table.find_or_insert(again).tolist() == [*range(96), *[-1] * 4, *range(90, 96), *[-1] * 4]
    assert int(table.num_ids) == 96 and int(table.num_refused) == 4
    table.grow(97)
    assert table.capacity == 192
    assert table.find_or_insert(again).tolist() == [*range(100), *range(90, 100)]
    assert int(table.num_ids) == 100 and int(table.num_refused) == 4
    table.grow(1)
    assert table.capacity == 192


class LateEvent:
    """Of a device that is not over with what it was given until it is waited for."""

    waits = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waits += 1


def test_the_host_waits_only_where_its_count_is_tight() -> None:
    pytest.importorskip("triton")
    with interpreted():
        table, event = HashTable(192, CPU), LateEvent()
        for number in range(3):
            table.reserve(50)
            if number == 1:
                table._reading = event  # type: ignore[assignment]
            table.find_or_insert(torch.arange(50))
        assert event.waits == 0 and table.most == 150
        table.reserve(50)
    assert event.waits == 1 and table._reading is None and table.capacity == 384


def test_owners_are_even_and_those_of_the_hash_of_the_core() -> None:
    ids = torch.cat([torch.arange(5000), torch.randint(2**63 - 1, (5000,)), torch.tensor([2**63 - 1, NO_ID])])
    for ranks in (1, 2, 3, 4096):
        found = owners(ids, ranks)
        wanted = [int(word) * ranks >> 64 for word in ops.splitmix64(ids.numpy())]
        assert found.tolist() == wanted
    assert owners(ids, 3).bincount().min() > 3100


def test_a_table_has_a_limit() -> None:
    with pytest.raises(InvalidArgument, match="1,610,612,736"):
        HashTable(2**31, CPU)
