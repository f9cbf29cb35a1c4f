"""The compiled state of a shard: what no other test reaches, of its words, failpoints and fingerprints."""

from __future__ import annotations

import string
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from geartrain.ams.kernels import _core
from geartrain.ams.kernels._core import CompletedWrites, Lease, SyncGroups
from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import InvalidArgument, ShardUnavailable, StaleClient, StepMismatch
from geartrain.ams.values.shard_messages import CallContext, Push, SyncGroup


def test_a_failpoint_of_compiled_code_is_one_of_python() -> None:
    with failpoints.armed("shard.apply.before=error@2") as passes:
        _core.reach_failpoint("shard.apply.before")
        with pytest.raises(ShardUnavailable, match=r"failpoint shard\.apply\.before"):
            _core.reach_failpoint("shard.apply.before")
    _core.reach_failpoint("shard.apply.before")
    assert passes.passed == {"shard.apply.before": 2}


@given(st.text(string.printable + "äπ漢", min_size=1))
@example("it's")
@example('it\'s "quoted"')
@example("\\ \n \x7f")
def test_a_name_is_written_as_python_writes_it(name: str) -> None:
    writes = CompletedWrites()
    writes.admit(CallContext(stream=name, sequence=1, incarnation=2), Future())
    with pytest.raises(StaleClient) as refused:
        writes.admit(CallContext(stream=name, sequence=2, incarnation=1), Future())
    assert str(refused.value).startswith(f"incarnation 1 of stream {name!r} was superseded by 2: another process")


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e16)
@example(1e15)
@example(1e-4)
@example(1e-5)
@example(100.0)
@example(5e-324)
def test_a_number_is_written_as_python_writes_it(number: float) -> None:
    group = SyncGroup(job="j", world_size=2, rank=0, sequence=1, sample_count=1)
    push = Push(table="t", ids=np.arange(0), gradients=np.empty((0, 1), np.float32), lr=number, group=group)
    groups = SyncGroups(1.0)
    groups.join(CallContext(), push)
    with pytest.raises(StepMismatch) as refused:
        groups.join(CallContext(), replace(push, lr=None, group=replace(group, rank=1)))
    assert f"with lr as the table's, another rank with lr {number}; all ranks" in str(refused.value)
    now = 0.0
    lease = Lease(1, abs(number), clock=lambda: now)
    now = 3 * abs(number) + 1.0
    if now < float("inf"):
        with pytest.raises(ShardUnavailable) as stopped:
            lease.check()
        assert f"was stopped for {now:.1f} s, and its lease of {abs(number):g} s ran out" in str(stopped.value)


def test_a_number_of_more_than_64_bits_is_refused_by_its_name() -> None:
    for name in ("sequence", "incarnation", "oldest_unacknowledged"):
        context = replace(CallContext(stream="s", sequence=1), **{name: 2**63})
        with pytest.raises(InvalidArgument, match=rf"{name} is 9223372036854775808; it must be a whole number below"):
            CompletedWrites().admit(context, Future())
