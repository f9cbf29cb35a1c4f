"""Class sampling of ``ams/kernels`` on a device: the same ids as on a CPU, fixed shapes, and no host waits.

The permutation of [0, C) is a Feistel network over [0, 2^bits), repeated ("walked") until it falls inside the range.
A kernel walks in registers and sets a bit for each class. Tensor operations cannot tell how long a walk is, and do all
walks by pointer doubling: after r rounds everything outside [0, C) points at most 2^r places further along its cycle,
and bits rounds reach every end.

With a graph of near classes, classes near the labels come first. Candidates are ordered: the labels, then the nearest
neighbour of each, then the second ones, and so on. A sort by class finds the first place of each class, and the
earliest of these places are chosen.

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
"""−log of the probability that a part of the range has more ids than the places of :func:`room_for`."""

Limit = Callable[[Tensor], Tensor]
"""Returns how many draws count, given which of them are new and on this rank: bool [N] -> int64 (0-dim)."""


class SampledIds(NamedTuple):
    """Chosen ids in a part of the range."""

    ids_A: Tensor
    """int64, ascending, counted from the start of the part; from ``num`` on the last id of the part repeats."""
    num: Tensor
    """int64 (0-dim): number of chosen ids."""
    num_given: Tensor
    """int64 (0-dim): number of distinct given ids of the whole range."""


def room_for(max_given: int, budget: int, num_ids: int, num_here: int) -> int:
    """Return the places (A) for the choice of :func:`filled_by_sample` in a part of ``num_here`` ids.

    They cover the ``max_given`` ids, and so many others that more are drawn only once in 10²¹ times: mean + 10·√mean +
    34 (Bernstein's inequality, which also holds without replacement: Hoeffding 1963, section 6). All of the part is the
    most.
    """
    if num_here == num_ids:
        return min(num_ids, max(budget, max_given))
    share = num_here / num_ids
    spread = budget * share * (1 - share)
    drawn = budget * share + _UNLIKELY / 3 + math.sqrt((_UNLIKELY / 3) ** 2 + 2 * _UNLIKELY * spread)
    return min(num_here, max(budget, max_given), max_given + math.ceil(drawn))


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
    """Return the given ids, filled up to ``budget`` with the first others of the permutation of (seed, step).

    The ids are those of ``ams.programs.selection.positives_and_sample``, on any device.

    Args:
        given_M: int64, in any order, with repeats; ids outside [0, C) are ignored.
        num_ids: C.
        budget: At most C.
        seed: Seed of the permutation.
        step: An int; or int64, 0-dim, on the device.
        start: Start of the part whose chosen ids are returned.
        stop: End of that part.
        room: Places (A): if more ids are chosen, the lowest are returned.
        limit: For ranks that know only the given ids of their own part: finds with the others how many draws count.

    A kernel needs C / 8 + 4·budget + 8·A more bytes, reads them about twice, and walks ``budget`` times, with some 200
    integer operations each. Every rank does all walks, since the order is known only from all of them.
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
    cost = Cost(num_bytes=8.0 * len(given_M) + 64.0 * len(given_M))  # a cache line for each bit
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
        most += num_ids  # all ids that are left
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
    """Return labels and their lists of neighbours: [1 + k, B] of class + 1; 0: none. A repeated label is there once.

    Args:
        labels_B: int64, ascending, with repeats; one outside [0, C) is left out.
        offsets: int64 [C + 1], start of each class's list.
        neighbours: Integers [E], E >= 1: the lists.
        longest: Length of the longest list (k).
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
    """Return the first P + round(``near`` · (``budget`` − P)) distinct classes, int64 [(1 + k)·B]; C in unused places.

    ``said_KB`` holds classes + 1 as from :func:`candidates_here`, of all ranks together; P are distinct in its first
    row. Halves are rounded to even numbers.
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
    # A walk from outside starts where it is; a walk from inside starts with one pass of the network.
    ahead = _permuted(torch.arange(num_ids, 2**bits, device=device), bits, keys)
    for _ in range((outside - 1).bit_length() if outside > 1 else 0):
        ahead = _further(ahead, ahead, num_ids)
    return _further(_permuted(torch.arange(count, device=device), bits, keys), ahead, num_ids)


def _further(values: Tensor, ahead: Tensor, num_ids: int) -> Tensor:
    """Return the values, moved on by ``ahead`` (from ``num_ids`` on) where they are outside the range."""
    if not len(ahead):
        return values
    return torch.where(values < num_ids, values, ahead[(values - num_ids).clamp_(min=0)])


def _permuted(values: Tensor, bits: int, keys: list[int]) -> Tensor:
    """Return one pass of the Feistel network over [0, 2^bits); ``values`` int64."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask, right_mask = 2**left_bits - 1, 2**right_bits - 1
    left, right = values >> right_bits, values & right_mask
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left ^= _mixed(right ^ left_key).bitwise_and_(left_mask)
        right ^= _mixed(left ^ right_key).bitwise_and_(right_mask)
    return left.bitwise_left_shift_(right_bits).bitwise_or_(right)


def _mixed(words: Tensor) -> Tensor:
    """Apply the 32-bit finaliser of MurmurHash3 in place; int64 keeps a product's low 32 bits, whatever its sign."""
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
