"""The ranks of a bench: they know each other, take turns, stand behind links of the given rate, and leave nothing."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


class Side:
    """What a bench runs on every rank."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.ones(size)
        self.calls = 0

    def sum(self) -> list[Any]:
        """All ranks together: the sum of a number, the call's number, and what torchrun would have told."""
        print("what a bench prints is no answer")
        self.calls += 1
        total = self.tensor[:1].clone()
        dist.all_reduce(total)
        return [total.item(), self.calls, os.environ["LOCAL_RANK"], dist.get_rank()]

    def exchange(self) -> float:
        """Seconds of swapping the whole tensor between two ranks."""
        dist.barrier()
        began = time.perf_counter()
        other = 1 - dist.get_rank()
        room = torch.empty_like(self.tensor)
        both = dist.batch_isend_irecv([dist.P2POp(dist.isend, self.tensor, other), dist.P2POp(dist.irecv, room, other)])
        for item in both:
            item.wait()
        return time.perf_counter() - began

    def fail(self, how: str) -> None:
        """Rank 1 raises or ends; the others wait for it."""
        if dist.get_rank() == 1:
            if how == "raise":
                raise ValueError("this one")
            os._exit(1)
        dist.barrier()


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("_rank_group")
    sys.path.remove(str(BENCHMARKS))


def test_ranks_take_turns_and_answer_in_order(bench: Any) -> None:
    before = psutil.Process().children(recursive=True)
    with bench.rank_group(Side, 2, {"size": 1}) as group:
        assert group.call("sum") == [[2.0, 1, "0", 0], [2.0, 1, "1", 1]]
        assert [calls for _, calls, _, _ in group.call("sum")] == [2, 2]
        with pytest.raises(bench.ConfigError, match="loopback is shared"):
            group.interface_bytes()
        with pytest.raises(bench.RankFailed, match=r"rank 1 failed: [\s\S]*ValueError: this one"):
            group.call("fail", how="raise")
    assert psutil.Process().children(recursive=True) == before


def test_a_link_passes_what_its_rate_allows_and_is_counted(bench: Any) -> None:
    if why := bench.why_no_links():
        pytest.skip(f"no links here: {why}")
    before = psutil.Process().children(recursive=True)
    size, rate = 500_000, 40e6
    with bench.rank_group(Side, 2, {"size": size}, bits_per_second=rate) as group:
        assert [total for total, _, _, _ in group.call("sum")] == [2.0, 2.0]
        counted = group.interface_bytes()
        seconds = max(group.call("exchange"))
        moved = [
            (after.received - sooner.received, after.sent - sooner.sent)
            for after, sooner in zip(group.interface_bytes(), counted, strict=True)
        ]
        group.limit(rate / 2)
        slower = max(group.call("exchange"))
        with pytest.raises(bench.RankFailed, match="rank 1 failed: its process ended"):
            group.call("fail", how="end")
    assert slower >= (size * 4 - 2 * bench.BURST_BYTES) * 8 / (rate / 2)
    least = (size * 4 - 2 * bench.BURST_BYTES) * 8 / rate
    assert seconds >= least  # both directions at once: one after the other would not tell
    assert all(size * 4 <= item < size * 4 * 1.1 for both in moved for item in both)
    assert psutil.Process().children(recursive=True) == before


def test_what_cannot_be_asked_for_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bench.ConfigError, match="num_ranks is 0"), bench.rank_group(Side, 0):
        pass
    monkeypatch.setenv("PATH", "")
    with pytest.raises(bench.ConfigError, match="there is no 'ip'"), bench.rank_group(Side, 1, bits_per_second=1e6):
        pass
