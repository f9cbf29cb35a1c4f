"""The tree of items: balanced, complete, and parted where the items are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import geartrain as gt
from geartrain.bridge.retrieval.item_tree import leaf_ids


@given(st.integers(2, 70), st.integers(0, 5))
def test_every_item_has_one_leaf_and_halves_differ_by_one(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = rng.permutation(1000)[:count]
    tree = gt.ItemTree.from_vectors(items, rng.normal(size=(count, 3)))
    assert sorted(tree.items) == sorted(items)
    assert 2 ** (tree.depth - 1) < count <= 2**tree.depth
    slots = tree.slots_of(items)
    assert len(set(slots.tolist())) == count
    for level in range(1, tree.depth + 1):
        above, below = np.unique(slots >> (tree.depth - level), return_counts=True)
        np.testing.assert_array_equal(above, tree.slots_at(level))
        assert below.max() - below.min() <= 1
        children, is_there = tree.children(level, tree.slots_at(level - 1)[None])
        np.testing.assert_array_equal(children[is_there], tree.slots_at(level))
    np.testing.assert_array_equal(tree.items_at(slots), items)


def test_nodes_have_ids_of_their_own_and_leaves_those_of_their_items() -> None:
    tree = gt.ItemTree(np.arange(21) * 3)
    nodes = tree.node_ids(tree.items)
    assert nodes.shape == (21, 5)
    assert len(np.unique(nodes)) == sum(len(tree.slots_at(level)) for level in range(1, 6))
    np.testing.assert_array_equal(nodes[:, -1], leaf_ids(tree.items))
    same_parent = nodes[:, -2] == nodes[1, -2]
    assert same_parent[:2].all()  # neighbours stay together
    moved = gt.ItemTree(tree.items[::-1])
    np.testing.assert_array_equal(moved.node_ids([30])[:, -1], tree.node_ids([30])[:, -1])


def test_items_are_parted_where_they_lie_apart() -> None:
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.repeat(np.arange(4), 16))
    centers = np.array([[0, 0], [0, 2], [20, 0], [20, 2]])
    tree = gt.ItemTree.from_vectors(np.arange(64), centers[kind] + rng.normal(size=(64, 2)) * 0.1)
    kinds_of_leaves = kind[tree.items]
    assert (kinds_of_leaves.reshape(4, 16) == kinds_of_leaves[::16, None]).all()
    assert {frozenset(kinds_of_leaves[:32].tolist()), frozenset(kinds_of_leaves[32:].tolist())} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }


def test_other_nodes_of_a_level_are_drawn_evenly_and_never_the_own() -> None:
    tree = gt.ItemTree(np.arange(5))
    level = tree.depth
    own = tree.slots_at(level)
    others = tree.others(level, own, 20_000, np.random.default_rng(0))
    for slot, drawn in zip(own, others, strict=True):
        found, counts = np.unique(drawn, return_counts=True)
        assert set(found.tolist()) == set(own.tolist()) - {int(slot)}
        assert counts.max() / counts.min() < 1.1


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([3], r"int64 \[1\]; they must be integers \[K\], at least two"),
        ([3, 4, 3], "item 3 occurs twice"),
        ([3, -4], "items go from -4 to 3"),
        ([0.5, 1.0], "items are float64"),
    ],
)
def test_items_that_cannot_be_are_refused(items: list[float], message: str) -> None:
    with pytest.raises(gt.errors.InvalidIds, match=message):
        gt.ItemTree(np.array(items))


def test_what_is_not_in_the_tree_is_named() -> None:
    tree = gt.ItemTree([5, 7, 9])
    with pytest.raises(gt.errors.InvalidIds, match="item 8 is not in the tree, which has 3"):
        tree.slots_of([5, 8])
    with pytest.raises(gt.errors.InvalidArgument, match=r"shape \[3, 2\]; they must be finite and \[2, D\]"):
        gt.ItemTree.from_vectors([1, 2], np.zeros((3, 2)))
