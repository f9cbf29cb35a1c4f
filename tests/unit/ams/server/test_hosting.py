"""A hosted model's update: one write, all of it or nothing, whatever the model makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.kernels._core import Lease
from geartrain.ams.programs.hosted import Gradients, HostedRows
from geartrain.ams.server import hosting
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.errors import (
    InternalError,
    InvalidArgument,
    NonFinite,
    ShardUnavailable,
    StepMismatch,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.shard_messages import (
    Arrays,
    CallContext,
    Computed,
    ComputeHosted,
    CreateTable,
    Done,
    DropTable,
    Freeze,
    HostedInputs,
    Pull,
    Reply,
    Request,
    SyncGroup,
    UpdateHosted,
)
from geartrain.ams.values.specs import Constant, Ids, TableSpec

NUM_ROWS, DIM = 9000, 2
SPEC = TableSpec(name="t", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_ROWS, initializer=Constant(0))
CHUNK = 1000
WRITE = CallContext(stream="s", sequence=1)


class Add:
    """Subtracts from every row what the inputs name ``value``; one row's gradient may be given apart."""

    def __init__(self, largest: float = np.inf) -> None:
        self.largest = largest
        self.made = 0

    def compute(self, rows: HostedRows, operation: str, inputs: Sequence[HostedInputs]) -> Arrays:
        if operation != "sum":
            raise InvalidArgument(f"operation {operation!r}")
        ids = rows.owned_ids(0, rows.num_owned)
        assert rows.owns(ids).all()
        return {"sum": rows.read(ids).sum(axis=0, dtype=np.float64) + float(inputs[0].step)}

    def gradients(self, rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
        value = sum(float(item.arrays["value"][0]) * item.weight for item in inputs)
        other = {int(item.settings["row"]): item.settings["its"] for item in inputs if "row" in item.settings}

        def ids(start: int) -> Ids:
            return rows.owned_ids(start, min(start + CHUNK, rows.num_owned))

        def make(start: int) -> Any:
            self.made += 1
            gradient_ND = np.full((len(ids(start)), DIM), value, np.float32)
            for row, its in other.items():
                gradient_ND[ids(start) == row] = its
            return gradient_ND

        return Gradients(
            chunks=range(0, rows.num_owned, CHUNK), ids=ids, make=make, num_rows=rows.num_owned, largest=self.largest
        )


@pytest.fixture(params=["held", "chunked"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Add:
    if request.param == "chunked":
        monkeypatch.setattr(hosting, "HELD_BYTES", 0)
    return Add()


def make_shard(model: Add, threads: int = 2, **settings: Any) -> Shard:
    owned = buckets_of_shard(even_placement(2), 1)
    shard = Shard(1, owned, incarnation=1, models={"add": model}, threads=threads, **settings)
    ask(shard, CreateTable(spec=SPEC))
    return shard


@pytest.fixture
def shard(model: Add) -> Iterator[Shard]:
    made = make_shard(model)
    yield made
    made.close()


def ask(shard: Shard, request: Request, context: CallContext | None = None) -> Reply:
    return shard.submit(context or CallContext(), request).result(timeout=10)


def update(value: float, *, weight: float = 1.0, **fields: Any) -> UpdateHosted:
    settings = fields.pop("settings", {})
    inputs = HostedInputs(arrays={"value": np.array([value], np.float32)}, settings=settings, weight=weight)
    return UpdateHosted(**{"table": "t", "model": "add", "inputs": (inputs,), **fields})


def rows(shard: Shard) -> Any:
    ids = np.arange(1, NUM_ROWS, 2)
    out = np.empty((len(ids), DIM), np.float32)
    ask(shard, Pull(table="t", ids=ids, out=out))
    return out


def test_an_update_changes_every_row_once(shard: Shard) -> None:
    first = ask(shard, update(2.0, scale=0.5), WRITE)
    assert isinstance(first, Done) and first.created == NUM_ROWS // 2
    assert (rows(shard) == -1).all()
    again = ask(shard, update(2.0, scale=0.5), WRITE)
    assert isinstance(again, Done) and again.duplicate and again.created == first.created
    assert (rows(shard) == -1).all()
    ask(shard, update(1.0, lr=3.0), CallContext(stream="s", sequence=2))
    assert (rows(shard) == -4).all()


def test_a_gradient_that_is_not_finite_changes_no_row(shard: Shard) -> None:
    last = NUM_ROWS - 1
    with pytest.raises(NonFinite, match=f"id {last}"):
        ask(shard, update(1.0, settings={"row": last, "its": np.inf}), WRITE)
    assert (rows(shard) == 0).all()
    ask(shard, update(1.0), WRITE)  # the number is free: nothing was applied under it
    assert (rows(shard) == -1).all()


def test_a_row_that_would_leave_its_type_changes_no_row(shard: Shard) -> None:
    ask(shard, update(0.0, settings={"row": 8191, "its": -3e38}), WRITE)
    before = rows(shard)
    with pytest.raises(NonFinite, match="beyond the range"):
        ask(shard, update(1.0, settings={"row": 8191, "its": -3e38}), CallContext(stream="s", sequence=2))
    np.testing.assert_array_equal(rows(shard), before)


def test_gradients_with_a_known_bound_are_made_once(model: Add) -> None:
    model.largest = 5.0
    shard = make_shard(model)
    try:
        ask(shard, update(5.0), WRITE)
    finally:
        shard.close()
    assert model.made == 5  # chunks of the 4,500 rows


def test_an_update_that_was_cut_off_is_not_made_again_on_top_of_itself(
    model: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "HELD_BYTES", 0)
    model.largest = 5.0
    shard = make_shard(model, threads=1)
    try:
        made = model.gradients

        def fails_late(rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
            def make(start: int) -> Any:
                if start:
                    raise MemoryError("no room for a chunk")
                return gradients.make(start)

            gradients = made(rows, inputs)
            return replace(gradients, make=make)

        with monkeypatch.context() as broken:
            broken.setattr(model, "gradients", fails_late)
            with pytest.raises(InternalError, match=r"half-way.*no room for a chunk"):
                ask(shard, update(1.0), WRITE)
        torn: list[Request] = [update(1.0), Pull(table="t", ids=np.array([1]), out=np.empty((1, DIM), np.float32))]
        for request in [*torn, Freeze(snapshot_id="s")]:
            with pytest.raises(InternalError, match="go back to a snapshot"):
                ask(shard, request, WRITE)
        ask(shard, DropTable(table="t"))
        ask(shard, CreateTable(spec=SPEC))
        ask(shard, update(1.0), CallContext(stream="s", sequence=2))
        assert (rows(shard) == -1).all()
    finally:
        shard.close()


ROOM = """
import resource
import sys

import numpy as np

sys.path.insert(0, {root!r})
from geartrain.ams.server import hosting
from geartrain.ams.server.hosting import Hosting
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant, TableSpec
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import GeartrainError
from tests.unit.ams.server import test_hosting as tests

hosting.HELD_BYTES = 0
tests.CHUNK, tests.DIM = 1000, 512
spec = TableSpec(name="t", dim=512, optimizer=SGD(1.0), num_rows=100_000, initializer=Constant(0))
table = RowTable(spec, np.arange(4096))
model = tests.Add(largest=5.0)
host = Hosting({{"add": model}}, np.arange(4096), threads=1)
host.update(table, tests.update(1.0), lambda: None)
table.freeze()
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (100 << 20), -1))  # half of what the freeze may have to keep
try:
    host.update(table, tests.update(1.0), lambda: print("changing"))
except MemoryError:
    print("no room")
except GeartrainError as error:
    print(error)
out = np.empty((100_000, 1), np.float32)
for start in range(0, 100_000, 1000):
    part = np.empty((1000, 512), np.float32)
    table.pull(np.arange(start, start + 1000), part)
    out[start : start + 1000] = part[:, :1]
print(np.unique(out))
"""


@pytest.mark.exact_memory
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_freeze_that_has_no_room_for_an_update_stops_it_before_it_begins() -> None:
    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run(
        [sys.executable, "-c", ROOM.format(root=root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[:2] == ["no room", "[-1.]"], done.stdout + done.stderr


STEP = """
import resource
import sys

import numpy as np

sys.path.insert(0, {root!r})
from geartrain.ams.programs.hosted import Gradients
from geartrain.ams.server import hosting
from geartrain.ams.server.hosting import Hosting
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Constant, TableSpec
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import GeartrainError
from tests.unit.ams.server import test_hosting as tests

NUM, DIM, FEW = 20_000, 512, np.arange(10)


class Few(tests.Add):
    def gradients(self, rows, inputs):
        make = lambda chunk: np.zeros((10, DIM), np.float32)
        return Gradients(chunks=[0], ids=lambda chunk: FEW, make=make, num_rows=10, largest=0.0)


hosting.HELD_BYTES = 0
optimizer = SparseMomentum(0.1, untouched="elapsed")
spec = TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=NUM, initializer=Constant(0))
table = RowTable(spec, np.arange(4096), window=4)
table.push(np.arange(NUM), np.ones((NUM, DIM), np.float32))
table.end_step()
table.end_step()
table.freeze()
host = Hosting({{"add": Few()}}, np.arange(4096), threads=1)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (40 << 20), -1))  # half of what the freeze has to keep of the sweep
for attempt in range(2):
    try:
        host.update(table, tests.update(1.0), lambda: print("changing"))
        print(table.steps.now)
    except MemoryError:
        print("no room")
    except GeartrainError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
"""


@pytest.mark.exact_memory
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_freeze_that_has_no_room_for_the_end_of_a_step_stops_it_before_it_begins() -> None:
    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(root=root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[:3] == ["no room", "changing", "4"], done.stdout + done.stderr


def test_a_shard_that_may_be_anothers_changes_nothing(model: Add) -> None:
    lease = Lease(1, 1000.0)
    shard = make_shard(model, lease=lease)
    try:
        made = model.gradients

        def lose_it(rows: HostedRows, inputs: Sequence[HostedInputs]) -> Gradients:
            lease.revoke("taken over while it computed")
            return made(rows, inputs)

        model.gradients = lose_it  # type: ignore[method-assign]
        with pytest.raises(ShardUnavailable, match="taken over"):
            ask(shard, update(1.0), WRITE)
        assert shard._tables.find("t").rows.num_present == 0
    finally:
        shard.close()


def test_what_is_computed_sees_the_rows_of_the_shard(shard: Shard) -> None:
    ask(shard, update(1.0), WRITE)
    inputs = (HostedInputs(arrays={}, step=7),)
    computed = ask(shard, ComputeHosted(table="t", model="add", operation="sum", inputs=inputs))
    assert isinstance(computed, Computed)
    np.testing.assert_array_equal(computed.arrays["sum"], [7 - NUM_ROWS / 2] * DIM)


def test_a_model_that_is_not_there_is_named(shard: Shard) -> None:
    request = ComputeHosted(table="t", model="mlp", operation="sum", inputs=())
    with pytest.raises(InvalidArgument, match="no model 'mlp'; it hosts 'add'"):
        ask(shard, request)
    with pytest.raises(InvalidArgument, match="no model 'mlp'"):
        ask(shard, update(1.0, model="mlp"), WRITE)


@pytest.mark.parametrize(("field", "value"), [("lr", np.inf), ("lr", -1.0), ("scale", np.nan)])
def test_settings_out_of_range_change_nothing(shard: Shard, field: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=field):
        ask(shard, update(1.0, **{field: value}), WRITE)
    assert (rows(shard) == 0).all()


def member(rank: int, samples: int, sequence: int = 1) -> SyncGroup:
    return SyncGroup(job="j", world_size=2, rank=rank, sequence=sequence, sample_count=samples)


def by(rank: int, sequence: int = 1) -> CallContext:
    return CallContext(stream=f"rank{rank}", sequence=sequence, incarnation=1)


def test_ranks_are_weighted_by_samples_and_applied_once(shard: Shard) -> None:
    first = shard.submit(by(0), update(4.0, scale=0.5, group=member(0, 3)))
    second = shard.submit(by(1), update(8.0, scale=0.5, group=member(1, 1)))
    assert first.result(10) == second.result(10)
    assert (rows(shard) == -2.5).all()
    late = shard.submit(by(0, 9), update(4.0, scale=0.5, group=member(0, 3))).result(10)
    assert isinstance(late, Done) and late.duplicate
    with pytest.raises(StepMismatch, match="other gradients of rank 0"):
        shard.submit(by(0, 10), update(5.0, scale=0.5, group=member(0, 3))).result(10)


def test_a_rank_without_samples_still_counts(shard: Shard) -> None:
    empty = UpdateHosted(table="t", model="add", inputs=(), group=member(0, 0))
    first = shard.submit(by(0), empty)
    shard.submit(by(1), update(1.0, group=member(1, 2))).result(10)
    first.result(10)
    assert (rows(shard) == -1).all()
