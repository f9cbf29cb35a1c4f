"""Samples of senders are dealt to owners whole, in order, evenly, and in few spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geartrain.bridge.parallel.staged.stage_link import deal


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), owners=st.integers(1, 5))
def test_owners_take_what_senders_have_in_their_order(sizes: list[int], owners: int) -> None:
    spans = deal(sizes, owners)
    sent: list[list[int]] = [[0] * size for size in sizes]
    taken: list[dict[int, tuple[int, int]]] = [{} for _ in range(owners)]
    for span in spans:
        assert span.num > 0
        for number in range(span.num):
            sent[span.sender][span.at_sender + number] += 1
            taken[span.owner][span.at_owner + number] = (span.sender, span.at_sender + number)
    assert all(times == 1 for its in sent for times in its)
    assert all(sorted(its) == list(range(len(its))) for its in taken)
    joint = [its[place] for its in taken for place in range(len(its))]
    assert joint == [(sender, number) for sender, size in enumerate(sizes) for number in range(size)]
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    assert len(spans) <= len(sizes) + owners - 1
