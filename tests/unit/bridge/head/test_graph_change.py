"""Neighbour lists when classes come and go, against plain Python lists of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.graph_by_list import GraphParts
from geartrain.bridge.head.selection.graph_change import nearest_classes, renumbered, with_new
from tests.support.plain_graph import table_of

K = 3


def lists_of(table: NeighbourTable, live: LiveClasses) -> dict[int, list[int]]:
    ids = live.all_ids.tolist()
    return {ids[number]: [ids[item] for item in table.row(number)] for number in range(table.num_classes)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[LiveClasses, list[list[int]], list[int], list[int]]:
    """Live classes, a list of numbers for each, ids to retire, and how many then to add."""
    num = draw(st.integers(6, 14))
    free = draw(st.lists(st.integers(0, num - 1), max_size=num - 5, unique=True))
    live = LiveClasses(num).without(np.array(sorted(free), np.int64))
    count = live.num_live_classes
    rows = [
        draw(st.lists(st.integers(0, count - 1).filter(lambda one, me=me: one != me), max_size=K, unique=True))
        for me in range(count)
    ]
    retired = draw(st.lists(st.sampled_from(live.all_ids.tolist()), max_size=count - 4, unique=True))
    later = live.without(np.array(sorted(retired), np.int64))
    spare = num - later.num_live_classes
    new = later.free_ids(draw(st.integers(0, spare))).tolist()
    return live, rows, retired, new


def owners_of(num_classes: int) -> list[GraphParts]:
    """Three ranks, of which one has no class."""
    bounds = [(0, num_classes // 3), (num_classes // 3, num_classes // 3), (num_classes // 3, num_classes)]
    return [GraphParts(Communicator(), first, stop) for first, stop in bounds]


def require_parts(parts: list[NeighbourTable], table: NeighbourTable, live: LiveClasses) -> None:
    for part, of in zip(parts, owners_of(live.num_classes), strict=True):
        expected = of.cut(table, live)
        assert (part.first, part.total, part.k) == (expected.first, live.num_live_classes, table.k)
        np.testing.assert_array_equal(part.offsets, expected.offsets)
        np.testing.assert_array_equal(part.neighbours, expected.neighbours)


@given(cases(), st.randoms(use_true_random=False))
def test_lists_change_as_plain_lists_do(
    case: tuple[LiveClasses, list[list[int]], list[int], list[int]], random: Any
) -> None:
    before, rows, retired, new = case
    table = table_of(rows, K)
    plain = lists_of(table, before)
    owners = owners_of(before.num_classes)
    parts = [of.cut(table, before) for of in owners]
    middle = before.without(np.array(sorted(retired), np.int64))
    table = renumbered(table, before, middle)
    gone = set(retired)
    plain = {name: [other for other in near if other not in gone] for name, near in plain.items() if name not in gone}
    assert lists_of(table, middle) == plain
    parts = [renumbered(part, before, middle, of.bounds(middle)) for of, part in zip(owners, parts, strict=True)]
    require_parts(parts, table, middle)
    if not new:
        return
    after = middle.with_added(np.array(new, np.int64))
    table = renumbered(table, middle, after)
    parts = [renumbered(part, middle, after, of.bounds(after)) for of, part in zip(owners, parts, strict=True)]
    require_parts(parts, table, after)
    nearest = {item: random.sample([other for other in after.all_ids.tolist() if other != item], K) for item in new}
    numbers = np.array([after.numbers(np.array(nearest[item])) for item in new])
    table = with_new(table, after.numbers(np.array(new)), numbers)
    require_parts([with_new(part, after.numbers(np.array(new)), numbers) for part in parts], table, after)
    for rank in reversed(range(K)):
        for item in reversed(new):
            if nearest[item][rank] not in new:
                plain[nearest[item][rank]].insert(0, item)
    expected = {name: near[:K] for name, near in plain.items()} | nearest
    assert lists_of(table, after) == expected


@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 1000))
def test_the_nearest_classes_are_those_of_float64(num: int, k: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(num, 5)).astype(np.float32)
    numbers = np.unique(np.random.default_rng(seed + 1).integers(0, num, 3))
    found = nearest_classes(lambda ids: rows[ids], num, 5, numbers, k)
    unit = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    cosines = unit[numbers] @ unit.T
    cosines[np.arange(len(numbers)), numbers] = -2
    kept = min(k, num - 1)
    best = -np.sort(-cosines, axis=1)[:, :kept]
    np.testing.assert_allclose(np.take_along_axis(cosines, found, 1), best, atol=1e-6)
