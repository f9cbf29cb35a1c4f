"""Sequences of writes, losses, crashes, snapshots and restores, each step held against the oracle."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.client.writes import Write
from geartrain.ams.observe import failpoints
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.codec import specs as codec
from geartrain.ams.rpc.services import context_from_pb
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import (
    Fenced,
    GeartrainError,
    ShardRestarted,
    ShardUnavailable,
    SnapshotFailed,
    StaleClient,
    TableBeingRestored,
    TableNotFound,
)
from geartrain.ams.values.optimizers.registry import SGD, Momentum
from geartrain.ams.values.shard_messages import CallContext, Done, Pull
from geartrain.ams.values.specs import Constant, TableSpec
from tests.model.oracle import EITHER, Content, OracleShard, OracleTable, Refused, content_of, shard_of
from tests.model.simulated import FATES, Client, Clock, Died, Failure, Fate, Message, Network, SimulatedCluster, inject

NUM_IDS = 12
DIM = 2
SPECS = (
    TableSpec(name="sums", dim=DIM, optimizer=SGD(1.0), num_rows=NUM_IDS, initializer=Constant(0.0)),
    TableSpec(name="speeds", dim=DIM, optimizer=Momentum(0.5, momentum=0.5), initializer=Constant(2.0)),
)
_HAS_SHM = Path("/dev/shm").is_dir()
ALL_IDS = np.arange(NUM_IDS, dtype=np.int64)

MAX_FATES = 5
_DIGITS: tuple[Fate, ...] = ("deliver", "deliver", *FATES)
# One number for each choice: hypothesis draws those several times faster than lists.
fates = st.just(0) | st.integers(0, len(_DIGITS) ** MAX_FATES - 1)
tables = st.sampled_from([spec.name for spec in SPECS])
ids = st.integers(1, 2**NUM_IDS - 1)
small = st.integers(0, 2**32 - 1)


def script_of(number: int) -> list[Fate]:
    """Return the fates that a number stands for; 0 is none."""
    return [_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(MAX_FATES)]


def ids_of(number: int) -> list[int]:
    """Return the ids whose bits are set, the even ones last: not in order."""
    return sorted((item for item in range(NUM_IDS) if number >> item & 1), key=lambda one: (one % 2 == 0, one))


@dataclass
class Pending:
    """A write that its client has not been told the end of."""

    client: Client
    write: Write
    table: str
    ids: list[int]
    sequence: int
    opened: TableSpec
    """The table as the client had it open."""


@dataclass
class Begun:
    """A snapshot whose moment has passed."""

    snapshot: PendingSnapshot
    work: Callable[[], None]
    name: str
    content: Content


@dataclass
class Taken:
    """A snapshot that is listed."""

    path: Path
    content: Content = field(repr=False)


def _something_is_at_stake(machine: ClusterMachine) -> bool:
    return machine._calm >= 2


def _would_wait(client: Client) -> bool:
    """Whether its next write would wait for its own oldest one, which nobody else can end here."""
    stream = client.stream
    return stream._next - stream.oldest() >= stream._window


class ClusterMachine(RuleBasedStateMachine):
    """One sequence. The network tells the oracle of every message that reaches a shard, before the shard has it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.root = Path(tempfile.mkdtemp(prefix="geartrain-model-", dir="/dev/shm" if _HAS_SHM else None))
        self.clock, self.network = Clock(), Network(self._watch)
        self.disk = inject(self.patch, self.network, self.clock)
        self._is_checked = True
        self._calm = 0
        """Acknowledged writes since rows were last lost: something is at stake before it is lost again."""
        self._numbers = itertools.count(1)
        self.cluster: SimulatedCluster
        self.oracle: dict[int, OracleShard] = {}
        self.clients: list[Client] = []
        self.zombies: list[Client] = []
        self.pending: list[Pending] = []
        self.begun: list[Begun] = []
        self.taken: list[Taken] = []

    def teardown(self) -> None:
        try:
            self._end_cluster()
        finally:
            self.patch.undo()
            shutil.rmtree(self.root, ignore_errors=True)

    # What the network tells.

    def _watch(self, message: Message, answer: Callable[[], bytes]) -> bytes:
        self._is_checked = False
        shard = self.oracle[int(message.address[1:].removesuffix(":1"))]
        expected = self._expect(shard, message)
        try:
            reply = answer()
        except Failure as failure:
            assert expected is not None, f"{message.method} was refused, and should not have been: {failure}"
            raise
        assert expected is None or expected is EITHER, f"{message.method} was accepted; {expected.why}"
        return reply

    def _expect(self, shard: OracleShard, message: Message) -> Refused | None:
        version = self.cluster.shards[shard.number].cluster_version
        header: Any
        if message.method in ("Push", "Assign"):
            header, raw = framing.decode_framed(message.data, getattr(shard_pb2, f"{message.method}Request"))
        elif message.method == "Pull":
            header, raw = framing.decode_framed(message.data, shard_pb2.PullRequest)
        else:
            header = framing.parse(message.data, getattr(shard_pb2, f"{message.method}Request"))
        context = context_from_pb(header.context)
        refused = shard.fence(context, version)
        if refused is not None:
            return refused
        match message.method:
            case "Push" | "Assign":
                part = (header.part.index, header.part.count) if header.HasField("part") else None
                them = np.frombuffer(raw[14], np.int64)
                values = np.frombuffer(raw[15], np.float32).reshape(len(them), DIM)
                return shard.write(message.method, context, header.table, them, values, part)
            case "Pull":
                held = shard.tables.get(header.table)
                if held is None or not held.is_open or not held.is_meant_by(context):
                    return Refused("there is no such table, it is being restored, or another is meant")
                return None
            case "CreateTable":
                spec = codec.spec_from_pb(header.spec)
                shard.tables.setdefault(spec.name, OracleTable(spec, is_open=not header.for_restore))
            case "PublishTable":
                held = shard.tables.get(header.table)
                if held is None or held.spec.incarnation != header.incarnation or not held.restored_from:
                    return Refused("there is no such table, or it has no rows yet")
                held.is_open = True
            case "DropTable":
                shard.drop(header.table, header.incarnation)
            case "Freeze":
                return shard.freeze(header.snapshot_id, tuple(header.tables))
            case "WriteFrozen":
                if header.snapshot_id not in shard.frozen:
                    return Refused("nothing is held for this snapshot")
                if self.disk.at is not None or not Path(header.folder).exists():
                    return EITHER
            case "Thaw":
                shard.thaw(header.snapshot_id)
            case "Restore":
                content = next((item.content for item in self.taken if str(item.path) == header.folder), None)
                return shard.restore(header.folder, content, tuple(header.tables), tuple(header.incarnations))
        return None

    # What holds after every step.

    @invariant()
    def every_row_is_the_oracles(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for number, oracle in self.oracle.items():
            shard = self.cluster.shards[number]
            assert {spec.name for spec in shard.specs} == set(oracle.tables)
            for name, table in oracle.tables.items():
                mine = np.array([id_ for id_ in ALL_IDS if shard_of(id_, table.spec, oracle.num_shards) == number])
                if not len(mine):
                    continue
                found, present = np.empty((len(mine), DIM), np.float32), np.zeros(len(mine), np.bool_)
                if table.is_open:
                    shard.run(CallContext(), Pull(table=name, ids=mine, out=found, present=present)).result(10)
                else:
                    shard._tables.find(name).rows.pull(mine, found, present)
                expected = np.array([(table.rows.get(item) or table.initial())[0] for item in mine.tolist()])
                assert np.array_equal(found, expected), f"shard {number}, {name}: {found} is not {expected}"
                assert present.tolist() == [item in table.rows for item in mine.tolist()]

    # Clients that read and write.

    @initialize(num_shards=st.integers(1, 3))
    def begin(self, num_shards: int) -> None:
        self._begin_cluster(num_shards)
        for spec in SPECS:
            self._create(spec)

    @rule(which=small, table=tables, them=ids, seed=small, script=fates)
    def push(self, which: int, table: str, them: int, seed: int, script: int) -> None:
        client, chosen = self._client(which), ids_of(them)
        gradients = np.random.default_rng(seed).integers(-3, 4, (len(chosen), DIM)).astype(np.float32)
        if _would_wait(client):
            return
        sequence = client.stream._next
        opened = self._table(client, table)
        write = opened.prepare_push(np.array(chosen), gradients)
        self._send(Pending(client, write, table, chosen, sequence, opened.spec), script)

    @rule(which=small, table=tables, them=ids, seed=small, script=fates)
    def push_again(self, which: int, table: str, them: int, seed: int, script: int) -> None:
        """Pushes are most of what a job does."""
        self.push(which, table, them, seed, script)

    @rule(which=small, table=tables, them=ids, seed=small, script=fates)
    def assign(self, which: int, table: str, them: int, seed: int, script: int) -> None:
        client, chosen = self._client(which), ids_of(them)
        if _would_wait(client):
            return
        sequence = client.stream._next
        rows = np.random.default_rng(seed).integers(-9, 10, (len(chosen), DIM)).astype(np.float32)
        self.network.script.extend(script_of(script))
        try:
            self._table(client, table).assign(np.array(chosen), rows)
        except TableNotFound:
            client.opened.clear()
            return
        except (ShardUnavailable, Fenced):
            return
        finally:
            self.network.script.clear()
        self._require_applied(client, table, chosen, sequence)

    @precondition(lambda self: self.pending)
    @rule(which=small, script=fates)
    def retry(self, which: int, script: int) -> None:
        self._send(self.pending.pop(which % len(self.pending)), script)

    @rule(which=small, table=tables, them=ids, script=fates)
    def pull(self, which: int, table: str, them: int, script: int) -> None:
        client = self._client(which)
        self.network.script.extend(script_of(script))
        try:
            found = self._table(client, table).pull(np.array(ids_of(them)))
        except TableNotFound:
            client.opened.clear()
            return
        except (ShardUnavailable, Fenced):
            return
        finally:
            self.network.script.clear()
        for item, row in zip(ids_of(them), found, strict=True):
            held = self._held(table, item)
            assert np.array_equal(row, (held.rows.get(item) or held.initial())[0])

    @precondition(lambda self: self.network.late)
    @rule(which=small)
    def an_old_message_arrives(self, which: int) -> None:
        self.network.deliver_quietly(self.network.late.pop(which % len(self.network.late)))

    @rule(which=small)
    def a_client_is_replaced(self, which: int) -> None:
        """Its successor takes the stream over, sends what was under way once more, and is heard on every shard."""
        self.cluster.beat()
        position = which % len(self.clients)
        old = self.clients[position]
        if not all("sums" in shard.tables and shard.tables["sums"].is_open for shard in self.oracle.values()):
            return  # its first write could not reach every shard: an old process is refused only where it was heard
        new = Client(self.cluster, old.stream.name, next(self._numbers))
        new.stream._next = old.stream._next
        taken_over = [item for item in self.pending if item.client is old]
        self.pending = [item for item in self.pending if item.client is not old]
        for item in taken_over:
            item.write._numbers, item.write._rows = new.stream, new.cluster._calls.rows
            item.client = new
            new.stream._open[item.sequence] = None
        self.clients[position] = new
        self.zombies.append(old)
        for item in taken_over:
            self._send(item, 0)
        if _would_wait(new):
            return
        done = self._table(new, "sums").push(ALL_IDS, np.ones((NUM_IDS, DIM), np.float32))
        assert not done.duplicate

    @precondition(lambda self: self.zombies)
    @rule(which=small, table=tables, them=ids)
    def a_zombie_writes(self, which: int, table: str, them: int) -> None:
        zombie = self.zombies[which % len(self.zombies)]
        if _would_wait(zombie):
            return
        heard = all(
            shard.newest.get(zombie.stream.name, 0) > zombie.stream.incarnation for shard in self.oracle.values()
        )
        try:
            self._table(zombie, table).push(np.array(ids_of(them)), np.ones((len(ids_of(them)), DIM), np.float32))
        except (StaleClient, ShardRestarted, ShardUnavailable, TableNotFound):
            return
        assert not heard, "a process that was replaced has written"

    # Shards and tables that come and go.

    @precondition(_something_is_at_stake)
    @rule(which=small)
    def a_shard_dies_and_comes_back_empty(self, which: int) -> None:
        number = which % self.cluster.num_shards
        self._calm = 0
        self.cluster.kill(number)
        self._started(self.cluster.start(number))

    @rule()
    def shards_hear_of_the_cluster(self) -> None:
        self.cluster.beat()

    @rule()
    def a_client_joins(self) -> None:
        self.clients.append(Client(self.cluster, f"stream-{next(self._numbers)}", next(self._numbers)))

    @precondition(_something_is_at_stake)
    @rule(which=st.sampled_from(SPECS))
    def a_table_is_dropped_and_made_anew(self, which: TableSpec) -> None:
        self._calm = 0
        self.clients[0].cluster.drop_table(which.name)
        self._create(which)

    # Snapshots.

    @precondition(lambda self: self._calm and not self._has_lost_rows())
    @rule(which=small)
    def a_snapshot_is_taken_in_peace(self, which: int) -> None:
        self.a_snapshot_is_begun(which, 0)
        self.begun = self.begun[-1:]
        if self.begun:
            self.a_snapshot_is_finished(0, 0, None, Died)

    @precondition(lambda self: len(self.begun) < 2)
    @rule(which=small, script=fates)
    def a_snapshot_is_begun(self, which: int, script: int) -> None:
        client, name = self._client(which), f"step-{next(self._numbers)}"
        self.disk.arm(None, Died)
        self.network.script.extend(script_of(script))
        try:
            snapshot = client.cluster.snapshot(self.root, name)
        except (ShardUnavailable, Fenced, SnapshotFailed):
            return
        finally:
            self.network.script.clear()
        self.begun.append(Begun(snapshot, client.deferred.pop(), name, self._content()))

    @precondition(lambda self: self.begun)
    @rule(
        which=small,
        script=fates,
        at=st.sampled_from([None, None, *range(1, 31)]) | st.none(),
        error=st.sampled_from([Died, lambda: OSError(errno.ENOSPC, "full"), lambda: OSError(errno.EIO, "broken")]),
    )
    def a_snapshot_is_finished(self, which: int, script: list[Any], at: int | None, error: Any) -> None:
        begun = self.begun.pop(which % len(self.begun))
        self.disk.arm(at, error)
        self.network.script.extend(script_of(script))
        begun.work()
        self.network.script.clear()
        has_died, self.disk.at = self.disk.has_failed and error is Died, None
        listed = {snapshot.name: snapshot for snapshot in list_snapshots(self.root)}
        try:
            path = begun.snapshot.result(0)
            assert not self.disk.has_failed
            assert begun.name in listed
        except (GeartrainError, Died):
            assert has_died or begun.name not in listed, "a snapshot that failed is listed"
            path = self.root / begun.name
        if begun.name in listed:
            assert listed[begun.name].snapshot is not None
            assert listed[begun.name].snapshot.verify() == []
            # Of all that was whole when it began: what was being restored is left out.
            whole = {table["name"] for table in listed[begun.name].snapshot.manifest.tables}
            self.taken.append(Taken(path, {name: item for name, item in begun.content.items() if name in whole}))

    @precondition(lambda self: self.begun)
    @rule(which=small)
    def the_coordinator_of_a_snapshot_dies(self, which: int) -> None:
        begun = self.begun.pop(which % len(self.begun))
        assert begun.name not in {snapshot.name for snapshot in list_snapshots(self.root)}

    @precondition(lambda self: self.taken and (self._calm or self._has_lost_rows()))
    @rule(which=small, num_shards=st.integers(1, 4), script=fates)
    def another_cluster_goes_on_from_a_snapshot(self, which: int, num_shards: int, script: int) -> None:
        taken = self.taken[which % len(self.taken)]
        self._end_cluster()
        self._begin_cluster(num_shards)
        self._restore(taken, script)

    @precondition(lambda self: self.taken and (self._calm or self._has_lost_rows()))
    @rule(which=small, script=fates)
    def the_cluster_goes_back_to_a_snapshot(self, which: int, script: int) -> None:
        taken = self.taken[which % len(self.taken)]
        self._replace_clients()
        for spec in SPECS:
            self.clients[0].cluster.drop_table(spec.name)
        self._restore(taken, script)

    @precondition(lambda self: self.taken and (self._calm or self._has_lost_rows()))
    @rule(
        which=small,
        script=fates,
        at=st.sampled_from(["restore.create.after", "restore.publish.before", "table.publish.before"]),
    )
    def a_process_dies_while_it_restores(self, which: int, script: int, at: str) -> None:
        """Its tables stay, and nobody opens, reads or writes them; what others had open of them is gone."""
        taken = self.taken[which % len(self.taken)]
        self._calm = 0
        self.disk.arm(None, Died)
        cluster = self.clients[0].cluster
        self.network.script.extend(script_of(script))

        def reach(name: str) -> None:
            if name == at:
                raise Died

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "reach", reach)
            patch.setattr(cluster._scheduler, "drop_table", lambda *_: None)  # the dead remove nothing
            with suppress(Died, ShardUnavailable, Fenced):
                cluster.restore(taken.path, replace=True)
        self.network.script.clear()
        hidden = {name for shard in self.oracle.values() for name, table in shard.tables.items() if not table.is_open}
        view = self.cluster.scheduler.describe()
        assert hidden <= set(view.restoring_tables) <= set(view.incomplete_tables)
        assert not hidden.intersection(spec.name for spec in view.tables)
        for name in hidden:
            with pytest.raises(TableBeingRestored):
                cluster.table(name)

    @precondition(lambda self: self.taken and self._is_restoring())
    @rule(which=small, script=fates, replace=st.booleans())
    def another_process_restores_in_its_place(self, which: int, script: int, replace: bool) -> None:
        taken = self.taken[which % len(self.taken)]
        self._replace_clients()
        for spec in SPECS:
            if spec.name not in self.cluster.scheduler.describe().restoring_tables:
                self.clients[0].cluster.drop_table(spec.name)
        for name in set(self.cluster.scheduler.describe().restoring_tables) - set(taken.content):
            self.clients[0].cluster.drop_table(name)
        self._restore(taken, script, replace=replace)

    @precondition(lambda self: not self.taken and self._has_lost_rows())
    @rule()
    def the_job_starts_anew(self) -> None:
        self._replace_clients()
        for spec in SPECS:
            self.clients[0].cluster.drop_table(spec.name)
            self._create(spec)

    def _has_lost_rows(self) -> bool:
        return self._is_restoring() or any(not shard.tables for shard in self.oracle.values())

    def _is_restoring(self) -> bool:
        return any(not table.is_open for shard in self.oracle.values() for table in shard.tables.values())

    def _restore(self, taken: Taken, script: int, *, replace: bool = False) -> None:
        self._calm = 0
        self.disk.arm(None, Died)
        client = self.clients[0].cluster
        self.network.script.extend(script_of(script))
        try:
            client.restore(taken.path, replace=replace)
        except (ShardUnavailable, Fenced):
            self.network.script.clear()
            for spec in SPECS:
                client.drop_table(spec.name)
            client.restore(taken.path)
        finally:
            self.network.script.clear()
        found = self._content()
        assert {name: set(rows) for name, (_, rows) in found.items()} == {
            name: set(rows) for name, (_, rows) in taken.content.items()
        }
        for name, (_, rows) in taken.content.items():
            for item, (value, slot) in rows.items():
                held_value, held_slot = found[name][1][item]
                assert np.array_equal(held_value, value)
                assert np.array_equal(held_slot, slot)
        for spec in SPECS:
            if spec.name not in taken.content:
                self._create(spec)

    # Below: no rules.

    def _send(self, pending: Pending, script: int) -> None:
        self.network.script.extend(script_of(script))
        try:
            done = pending.write.send()
        except ShardUnavailable:
            self.pending.append(pending)
            return
        except (Fenced, TableNotFound):
            pending.client.opened.clear()
            pending.write.abandon()
            return
        finally:
            self.network.script.clear()
        assert isinstance(done, Done)
        self._require_applied(pending.client, pending.table, pending.ids, pending.sequence)

    def _require_applied(self, client: Client, table: str, them: list[int], sequence: int) -> None:
        """What was acknowledged is applied on every shard that owns some of it."""
        self._calm += 1
        for item in them:
            spec = self._held(table, item).spec
            shard = self.oracle[shard_of(item, spec, self.cluster.num_shards)]
            assert (client.stream.name, sequence) in shard.applied, "acknowledged, and nowhere"

    def _content(self) -> Content:
        return content_of(list(self.oracle.values()))

    def _held(self, table: str, one: int) -> OracleTable:
        spec = next(spec for spec in SPECS if spec.name == table)
        return self.oracle[shard_of(one, spec, self.cluster.num_shards)].tables[table]

    def _table(self, client: Client, name: str) -> Any:
        """The table as the client has it open: the one there was when it first used it, or was last refused."""
        from geartrain.ams.client.table import Table

        if name not in client.opened and client.tells_tables_apart:
            client.opened.update({spec.name: spec for spec in self.cluster.scheduler.describe().tables})
        whichever = next(spec for spec in SPECS if spec.name == name)
        return Table(client.opened.get(name, whichever), client.cluster._calls, client.stream)

    def _client(self, which: int) -> Client:
        return self.clients[which % len(self.clients)]

    def _create(self, spec: TableSpec) -> None:
        self.clients[0].cluster._scheduler.create_table(spec, reuse=False)

    def _begin_cluster(self, num_shards: int) -> None:
        self.oracle = {}
        self.cluster = SimulatedCluster(self.network, self.clock, num_shards, lambda: next(self._numbers))
        for shard in self.cluster.shards.values():
            self._started(shard)
        self._replace_clients()

    def _started(self, shard: Any) -> None:
        self._is_checked = False
        self.oracle[shard.shard] = OracleShard(shard.shard, self.cluster.num_shards, shard.incarnation)

    def _replace_clients(self) -> None:
        self.cluster.beat()
        self.clients, self.zombies, self.pending, self.begun = [], [], [], []
        for _ in range(2):
            self.a_client_joins()

    def _end_cluster(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.close()
