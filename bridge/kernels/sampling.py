"""The class sampling of ``ams/kernels`` on a device: the same ids as on a CPU, fixed shapes, and no host waits.

The permutation of [0, C) is a Feistel network over [0, 2^bits), walked until it falls inside the range. A kernel walks
in registers and sets a bit for each class; tensor operations, which cannot tell how far a walk goes, do all walks by
pointer doubling: after r rounds everything outside [0, C) points at most 2^r places further along its cycle, and bits
rounds reach every end.

Where a graph chooses, too, the classes near the labels come first: candidates lie by place, the labels, then the
nearest neighbour of each, the second ones, and so on. Sorted by class, the first place of each class counts, and of
these the earliest are chosen.

Legend: C the range, O = 2^bits − C < C numbers outside it, N ids wanted, M given, A places for the chosen ones; B
labels, P distinct ones, E entries of the classes' lists of neighbours here, k the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels

_WORD = 2**32 - 1
_LONG = 2**64 - 1
_UNLIKELY = 50.0
"""−log of the probability that more ids lie in a part of the range than :func:`room_for` gives places."""

Limit = Callable[[Tensor], Tensor]
"""Finds how many draws count, of which those that are new and of this rank are given: bool [N] -> int64 (0-dim)."""


class SampledIds(NamedTuple):
    """Chosen ids of a part of the range."""

    ids_A: Tensor
    """int64, rising, counted from the start of the part; behind ``num`` the last id of the part, again and again."""
    num: Tensor
    """int64 (0-dim): how many are chosen."""
    num_given: Tensor
    """int64 (0-dim): how many distinct ids of the whole range were given."""


def room_for(most_given: int, budget: int, num_ids: int, num_here: int) -> int:
    """Places (A) for what :func:`filled_by_sample` chooses of ``num_here`` of the ids: all of it if these are all.

    Else the ids given, ``most_given`` at most, and of the others so many that more are drawn once in 10²¹ times:
    mean + 10·√mean + 34 (Bernstein's inequality, which holds without replacement, too: Hoeffding 1963, section 6).
    """
    if num_here == num_ids:
        return min(num_ids, max(budget, most_given))
    share = num_here / num_ids
    spread = budget * share * (1 - share)
    drawn = budget * share + _UNLIKELY / 3 + math.sqrt((_UNLIKELY / 3) ** 2 + 2 * _UNLIKELY * spread)
    return min(num_here, max(budget, most_given), most_given + math.ceil(drawn))


def filled_by_sample(
    given_M: Tensor,
    num_ids: int,
    budget: int,
    seed: int,
    step: int | Tensor,
    *,
    start: int,
    stop: int,
    room: int,
    limit: Limit | None = None,
) -> SampledIds:
    """The ids given, filled up to ``budget`` with the first others of the permutation of (seed, step).

    Those of them in [``start``, ``stop``) come back, the lowest ``room`` (A) if they are more. ``given_M`` (int64) may
    rise or not and name an id twice; what is not in [0, C) counts as none. The same ids as
    ``ams.programs.selection.positives_and_sample`` on any device. ``budget`` is at most C. ``step`` may lie on the
    device (int64, 0-dim).

    Where ranks know the ids given in their own part alone, ``limit`` finds with the others which draws count.

    A kernel takes C / 8 + 4·budget + 8·A bytes beside, reads them about twice, and walks ``budget`` times, some 200
    operations on integers each; every rank walks all of it, since who is first is known to all walks alone.
    """
    if runs_kernels(given_M.device) and num_ids < 2**31:
        return _launch(given_M, num_ids, budget, seed, step, start, stop, room, limit)
    chosen = torch.zeros(num_ids + 1, dtype=torch.bool, device=given_M.device)
    is_id_M = (given_M >= 0) & (given_M < num_ids)
    chosen[torch.where(is_id_M, given_M, num_ids)] = True
    num_given = chosen[:num_ids].sum()
    drawn_N = sample_ids_on(given_M.device, num_ids, budget, seed, int(step))
    is_fresh_N = ~chosen[drawn_N]
    if limit is None:
        is_taken_N = is_fresh_N & (is_fresh_N.cumsum(0) <= budget - num_given)
    else:
        is_taken_N = _below(limit, is_fresh_N & (drawn_N >= start) & (drawn_N < stop))
    chosen[torch.where(is_taken_N, drawn_N, num_ids)] = True
    here = chosen[start:stop]
    places = torch.where(here, here.cumsum(0) - 1, room).clamp_(max=room)
    ids_A = torch.full((room + 1,), stop - start - 1, device=given_M.device)
    ids_A.scatter_(0, places, torch.arange(stop - start, device=given_M.device))
    return SampledIds(ids_A[:room], here.sum().clamp_(max=room), num_given)


def _below(limit: Limit, is_own_N: Tensor) -> Tensor:
    return is_own_N & (torch.arange(len(is_own_N), device=is_own_N.device) < limit(is_own_N))


def _launch(
    given_M: Tensor,
    num_ids: int,
    budget: int,
    seed: int,
    step: int | Tensor,
    start: int,
    stop: int,
    room: int,
    limit: Limit | None,
) -> SampledIds:
    from geartrain.bridge.kernels.triton import sampling as kernels

    def programs(size: int, block: int) -> tuple[int]:
        return (-(-size // block),)

    device, bits = given_M.device, (num_ids - 1).bit_length()
    words = -(-num_ids // 64)
    memory = torch.zeros(words + 1, dtype=torch.int64, device=device)
    num_given, bitmap = memory[words], memory[:words].view(torch.int32)
    cost = Cost(num_bytes=8.0 * len(given_M) + 64.0 * len(given_M))  # a line of the cache for each bit
    grid = programs(len(given_M), kernels.MARKED)
    launch(kernels.mark, grid, given_M, bitmap, num_given, len(given_M), num_ids, BLOCK=kernels.MARKED, cost=cost)
    drawn_N = torch.empty(budget, dtype=torch.int32, device=device)
    grid = programs(budget, kernels.DRAWN)
    fresh = torch.empty(grid, dtype=torch.int64, device=device)
    mixed = _splitmix64(seed & _LONG)
    given_step = step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)
    numbers = budget, num_ids, mixed - 2**64 if mixed >= 2**63 else mixed, given_step
    sizes = {"LEFT": bits // 2, "RIGHT": bits - bits // 2, "BLOCK": kernels.DRAWN, "num_warps": 2}
    cost = Cost(num_bytes=4.0 * budget + 4.0 * len(bitmap))
    launch(kernels.draw, grid, bitmap, drawn_N, fresh, *numbers, cost=cost, **sizes)
    most = budget
    if limit is not None:
        drawn_N = torch.where(_below(limit, (drawn_N >= start) & (drawn_N < stop)), drawn_N, -1)
        most += num_ids  # all that are left
    args = bitmap, drawn_N, fresh.cumsum(0), num_given, budget, most
    cost = Cost(num_bytes=4.0 * budget + 8.0 * len(bitmap))
    launch(kernels.mark_drawn, grid, *args, BLOCK=kernels.DRAWN, num_warps=2, cost=cost)
    words = -(-stop // 32) - start // 32 if stop > start else 0
    grid = programs(words, kernels.WORDS)
    num_set = torch.empty(grid, dtype=torch.int64, device=device)
    cost = Cost(num_bytes=4.0 * words)
    launch(kernels.count_words, grid, bitmap, num_set, start, stop, BLOCK=kernels.WORDS, num_warps=2, cost=cost)
    ids_A = torch.empty(room, dtype=torch.int64, device=device)
    num = torch.empty((), dtype=torch.int64, device=device) if words else num_set.sum()
    written = bitmap, num_set.cumsum(0), ids_A, num, start, stop, room
    cost = Cost(num_bytes=4.0 * words + 8.0 * room)
    launch(kernels.write_ids, grid, *written, BLOCK=kernels.WORDS, num_warps=4, cost=cost)
    return SampledIds(ids_A, num, num_given)


def candidates_here(labels_B: Tensor, offsets: Tensor, neighbours: Tensor, longest: int) -> Tensor:
    """The first of each of the labels, and its list: [1 + k, B] of class + 1, 0 for none.

    ``labels_B`` (int64) rise and may repeat; one outside [0, C) is none. Lists are entries ``offsets`` [C + 1] (int64)
    of ``neighbours`` [E] (of any integers, E >= 1), ``longest`` is k.
    """
    num_labels, num_lists = len(labels_B), len(offsets) - 1
    if not runs_kernels(labels_B.device) or not num_labels or not num_lists:
        is_new_B = torch.ones_like(labels_B, dtype=torch.bool)
        is_new_B[1:] = labels_B[1:] != labels_B[:-1]
        here_B = is_new_B & (labels_B >= 0) & (labels_B < num_lists)
        at_B = torch.where(here_B, labels_B, 0)
        ends_B = torch.where(here_B, offsets[(at_B + 1).clamp(max=num_lists)], 0)
        places_KB = offsets[at_B] + torch.arange(longest, device=labels_B.device).unsqueeze(1)
        found_KB = neighbours[places_KB.clamp(max=len(neighbours) - 1)]
        found_KB = torch.where(places_KB < ends_B, found_KB + 1, 0)
        own_B = torch.where(here_B, labels_B + 1, 0).to(neighbours.dtype)
        return torch.cat([own_B.unsqueeze(0), found_KB])
    from geartrain.bridge.kernels.triton.sampling import LABELS, RANKS, list_candidates

    said_KB = neighbours.new_empty(1 + longest, num_labels)
    grid = (-(-num_labels // LABELS), max(1, -(-longest // RANKS)))
    sizes = {"LABELS": LABELS, "RANKS": RANKS, "num_warps": 4}
    numbers = (num_labels, longest, num_lists)
    cost = Cost(2.0 * said_KB.nbytes + 64.0 * num_labels)  # a line of the cache for each list's offsets
    launch(list_candidates, grid, labels_B, offsets, neighbours, said_KB, *numbers, cost=cost, **sizes)
    return said_KB


def nearest_first(said_KB: Tensor, num_classes: int, near: float, budget: int) -> Tensor:
    """The first P + round(``near`` · (``budget`` − P)) different classes, P in the first row: int64 [(1 + k)·B].

    ``said_KB`` are classes + 1 as of :func:`candidates_here`, of all ranks together. C at all other places. Halves are
    rounded to even numbers.
    """
    said = said_KB.flatten()
    ids, order = torch.sort(said, stable=True)
    num_labels, num = said_KB.shape[1], len(said)
    if not runs_kernels(said.device) or not num:
        is_first = ids > 0
        is_first[1:] &= ids[1:] != ids[:-1]
        in_turn = torch.empty_like(is_first).scatter_(0, order, is_first)
        ends = in_turn.cumsum(0)
        num_distinct = (said[:num_labels] > 0).sum()
        num_near = num_distinct + torch.round((budget - num_distinct).double() * near).long()
        return torch.where(in_turn & (ends <= num_near), said.long() - 1, num_classes)
    from geartrain.bridge.kernels.triton.sampling import PLACES, first_places, select_nearest

    grid = (-(-num // PLACES),)
    in_turn = torch.empty(num, dtype=torch.int32, device=said.device)
    cost = Cost(num_bytes=(8.0 + said.element_size() + 32) * num)  # 32 bytes are written for each 4
    launch(first_places, grid, ids, order, in_turn, num, PLACES=PLACES, num_warps=4, cost=cost)
    given = torch.empty(num, dtype=torch.int64, device=said.device)
    args = (said, in_turn, in_turn.cumsum(0), given, num, num_labels, budget, num_classes)
    cost = Cost(num_bytes=(20.0 + said.element_size()) * num)
    launch(select_nearest, grid, *args, NEAR=near, PLACES=PLACES, num_warps=4, cost=cost)
    return given


def sample_ids_on(device: torch.device, num_ids: int, count: int, seed: int, step: int) -> Tensor:
    """Return :func:`geartrain.ams.kernels.ops.sample_ids` as int64 [N] on ``device``.

    About 100 + bits operations on N + O numbers (the C++ needs O(N) time), and 75·(N + O) bytes meanwhile. The
    arguments are those of that function, and are not checked.
    """
    bits = (num_ids - 1).bit_length()
    keys = _round_keys(seed, step)
    outside = 2**bits - num_ids
    # From the places outside it goes on by one pass of the network each, from the inside by one to begin with.
    ahead = _permuted(torch.arange(num_ids, 2**bits, device=device), bits, keys)
    for _ in range((outside - 1).bit_length() if outside > 1 else 0):
        ahead = _further(ahead, ahead, num_ids)
    return _further(_permuted(torch.arange(count, device=device), bits, keys), ahead, num_ids)


def _further(values: Tensor, ahead: Tensor, num_ids: int) -> Tensor:
    """Where the values lie, moved on where they are outside the range: ``ahead`` tells whereto, from ``num_ids`` on."""
    if not len(ahead):
        return values
    return torch.where(values < num_ids, values, ahead[(values - num_ids).clamp_(min=0)])


def _permuted(values: Tensor, bits: int, keys: list[int]) -> Tensor:
    """One pass of the Feistel network over [0, 2^bits); ``values`` int64."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask, right_mask = 2**left_bits - 1, 2**right_bits - 1
    left, right = values >> right_bits, values & right_mask
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left ^= _mixed(right ^ left_key).bitwise_and_(left_mask)
        right ^= _mixed(left ^ right_key).bitwise_and_(right_mask)
    return left.bitwise_left_shift_(right_bits).bitwise_or_(right)


def _mixed(words: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, in place; int64 keeps the low 32 bits of a product whatever its sign."""
    words ^= words >> 16
    words.mul_(0x85EBCA6B).bitwise_and_(_WORD)
    words ^= words >> 13
    words.mul_(0xC2B2AE35).bitwise_and_(_WORD)
    words ^= words >> 16
    return words


def _round_keys(seed: int, step: int) -> list[int]:
    base = _splitmix64(_splitmix64(seed & _LONG) ^ (step & _LONG))
    return [_splitmix64((base + number) & _LONG) >> 32 for number in range(1, 9)]


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)
