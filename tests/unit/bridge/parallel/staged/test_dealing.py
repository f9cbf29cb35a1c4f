"""Samples of senders are dealt to owners whole, in order, evenly, and in few parcels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geartrain.bridge.parallel.staged.dealing import deal


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), owners=st.integers(1, 5))
def test_owners_take_what_senders_have_in_their_order(sizes: list[int], owners: int) -> None:
    parcels = deal(sizes, owners)
    sent: list[list[int]] = [[0] * size for size in sizes]
    taken: list[dict[int, tuple[int, int]]] = [{} for _ in range(owners)]
    for one in parcels:
        assert one.num > 0
        for number in range(one.num):
            sent[one.sender][one.at_sender + number] += 1
            taken[one.owner][one.at_owner + number] = (one.sender, one.at_sender + number)
    assert all(times == 1 for its in sent for times in its)
    assert all(sorted(its) == list(range(len(its))) for its in taken)
    joint = [its[place] for its in taken for place in range(len(its))]
    assert joint == [(sender, number) for sender, size in enumerate(sizes) for number in range(size)]
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    assert len(parcels) <= len(sizes) + owners - 1
