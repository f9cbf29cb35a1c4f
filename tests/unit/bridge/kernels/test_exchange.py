"""What travels between ranks by kernels, in Triton's interpreter, against tensor operations; ranks are a list here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geartrain.bridge.kernels import exchange
from geartrain.bridge.kernels.exchange import RankPairs, RoutedIds, arrived, route
from geartrain.bridge.kernels.launch import interpreted
from geartrain.bridge.kernels.lookup import BagPiece, Entries, FieldShape, RowSpan, index_fields, pool

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are given addresses, here the host's")

NUM_ROWS, DIMS = [40, 9], [5, 8]
SHARES = [14, 3]
RANKS = 3


def asked_by(rank: int, num_fields: int = 3, *, weighted: bool = False) -> Entries:
    """Bags of none to seven ids, with padding; the last field has a factor."""
    rng = torch.Generator().manual_seed(rank)
    fields, ids, offsets = [], [], []
    for number in range(num_fields):
        table, num_vectors = number % 2, 11 + 2 * number
        bounds = torch.randint(8, (num_vectors,), generator=rng).cumsum(0)
        fields.append(
            FieldShape(
                table, int(bounds[-1]), num_vectors, 0, "mean" if number == num_fields - 1 else "sum", number or None
            )
        )
        ids.append(torch.randint(NUM_ROWS[table], (int(bounds[-1]),), generator=rng))
        offsets.append(torch.cat([torch.zeros(1, dtype=torch.int64), bounds]))
    weights = torch.rand(sum(map(len, ids)), generator=rng) if weighted else None
    return index_fields(fields, torch.cat(ids), torch.cat(offsets), weights, NUM_ROWS)[0]


def counts_of(routed: RoutedIds) -> list[list[int]]:
    return routed.starts_Q.diff().tolist()


def pairs_of(asked: Entries, routed: RoutedIds) -> RankPairs:
    num_fields, counts = len(asked.pieces), counts_of(routed)[1]
    return RankPairs(
        routed.pairs_RV,
        [counts[rank * num_fields : (rank + 1) * num_fields] for rank in range(RANKS)],
        [piece.num_vectors for piece in asked.pieces],
        [DIMS[piece.table] for piece in asked.pieces],
    )


def received(rank: int, asked: list[Entries], routed: list[RoutedIds]) -> Entries:
    """What the all-to-all brings to a rank."""
    num_fields = len(asked[0].pieces)
    pieces, first_pairs, words = [], [], []
    mine = slice(rank * num_fields, (rank + 1) * num_fields)
    for own, theirs in zip(asked, routed, strict=True):
        ids, pairs = counts_of(theirs)
        pieces += [
            BagPiece(piece.table, *nums) for piece, *nums in zip(own.pieces, ids[mine], pairs[mine], strict=True)
        ]
        first_pairs += theirs.starts_Q[1, mine].tolist()
        words.append(theirs.words[int(theirs.starts_Q[0, mine.start]) : int(theirs.starts_Q[0, mine.stop])])
    weighted = any(own.weights_N is not None for own in asked)
    return arrived(torch.cat(words), asked[rank], pieces, first_pairs, are_weighted=weighted)


def require_same_entries(found: Entries, wanted: Entries) -> None:
    assert found.pieces == wanted.pieces
    for name in ("key_N", "place_N", "bounds_V", "weights_N"):
        got, known = getattr(found, name), getattr(wanted, name)
        assert (got is None and known is None) or torch.equal(got, known), name


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BLOCK", 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("num_fields", "weighted"), [(3, True), (1, False)])
def test_ids_of_all_ranks_arrive_as_in_tensor_operations(num_fields: int, weighted: bool) -> None:
    asked = [asked_by(rank, num_fields, weighted=weighted and rank == 1) for rank in range(RANKS)]
    known = [route(own, SHARES, RANKS) for own in asked]
    with interpreted():
        found = [route(own, SHARES, RANKS) for own in asked]
    for got, wanted in zip(found, known, strict=True):
        travels = int(wanted.starts_Q[0, -1])
        assert torch.equal(got.starts_Q, wanted.starts_Q)
        assert torch.equal(got.pairs_RV, wanted.pairs_RV)
        assert torch.equal(got.words[:travels], wanted.words[:travels])
    for rank in range(RANKS):
        with interpreted():
            entries = received(rank, asked, found)
        require_same_entries(entries, received(rank, asked, known))


@pytest.mark.usefixtures("small_blocks")
def test_nothing_asked_is_nothing_sent() -> None:
    asked, _ = index_fields(
        [FieldShape(0, 0, 4, 0)], torch.empty(0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), None, [9]
    )
    with interpreted():
        routed = route(asked, [3], RANKS)
        entries = arrived(routed.words, asked, [BagPiece(0, 0, 0)] * 3, [0] * 3, are_weighted=False)
        (vectors,) = RankPairs(routed.pairs_RV, [[0]] * 3, [4], [6]).combine(torch.empty(0), None)
    assert routed.starts_Q.tolist() == [[0] * 4] * 2
    assert entries.bounds_V.tolist() == [0]
    assert torch.equal(vectors, torch.zeros(4, 6))


def poisoned(number: int) -> Tensor:
    return torch.full((number,), torch.nan)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("num_fields", "is_double"), [(3, False), (2, True)])
def test_sums_and_gradients_of_pairs_travel_as_in_tensor_operations(
    num_fields: int, is_double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_by(0, num_fields)
    routed = route(asked, SHARES, RANKS)
    pairs = pairs_of(asked, routed)
    rng = torch.Generator().manual_seed(num_fields)
    sums = torch.randn(sum(pairs.sizes), generator=rng)
    wide = torch.randn(40, 30, generator=rng)
    upstream: list[Tensor | None] = [
        wide[:num, 9 * at : 9 * at + dim]
        for at, (num, dim) in enumerate(zip(pairs.num_vectors, pairs.dims, strict=True))
    ]
    if is_double:
        upstream[0] = None
        upstream[1] = torch.ones(()).expand(pairs.num_vectors[1], pairs.dims[1])  # of sum(): no memory of its own
    joined, spread = pairs.combine(sums, asked.factor_V), pairs.spread(upstream, asked.factor_V)
    empty = torch.empty
    with interpreted(), monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **more: empty(*shape, **more).fill_(torch.nan))
        found, sent = pairs.combine(sums, asked.factor_V), pairs.spread(upstream, asked.factor_V)
    assert all(torch.equal(got, wanted) for got, wanted in zip(found, joined, strict=True))
    assert torch.equal(sent, spread)
    if num_fields == 3:  # what the ranks have summed of all-ones gradients is how many ranks there are
        counts = pairs.combine(torch.ones_like(sums), None)
        has_RV = routed.pairs_RV.diff().view(RANKS, -1).sum(0)
        assert torch.equal(torch.cat([own[:, 0] for own in counts]), has_RV.float())


@pytest.mark.parametrize("weighted", [True, False])
def test_ranks_together_pool_what_one_does(weighted: bool) -> None:
    """From the ids to the vectors, and in float64 against one rank's."""
    asked = [asked_by(rank, weighted=weighted) for rank in range(RANKS)]
    rng = torch.Generator().manual_seed(1)
    rows = [torch.randn(num, dim, generator=rng) for num, dim in zip(NUM_ROWS, DIMS, strict=True)]
    routed = [route(own, SHARES, RANKS) for own in asked]
    pairs = [pairs_of(*both) for both in zip(asked, routed, strict=True)]
    here: list[list[Tensor]] = []
    for rank in range(RANKS):
        spans = [
            RowSpan(own[min(rank * share, len(own)) : (rank + 1) * share], min(rank * share, len(own)))
            for own, share in zip(rows, SHARES, strict=True)
        ]
        entries = received(rank, asked, routed)
        flat = poisoned(sum(piece.num_vectors * DIMS[piece.table] for piece in entries.pieces))
        with interpreted():
            pool(entries, spans, into=flat)
        here.append(list(flat.split_with_sizes([own.sizes[rank] for own in pairs])))
    whole = [RowSpan(own.double(), 0) for own in rows]
    for rank, own in enumerate(pairs):
        with interpreted():
            found = own.combine(torch.cat([parts[rank] for parts in here]), asked[rank].factor_V)
        for got, wanted in zip(found, pool(asked[rank], whole), strict=True):
            torch.testing.assert_close(got, wanted.float(), rtol=2e-6, atol=2e-6)
