"""A whole cluster in one process whose network, clock and disk a test steps: no sockets, no waiting, no chance.

Everything between is the product's own: the clients' retries, the encoding of messages, the parts of split writes, the
shards' threads, the scheduler. Only rows go in messages, as those of clients of other languages do. A message is bytes,
so that it can be lost, answered into the void, arrive twice, or arrive long after its sender gave it up.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, ClassVar, Literal

import grpc
import numpy as np
import pytest

from geartrain.ams.client import retries
from geartrain.ams.client import table as table_module
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.embedded import LocalScheduler
from geartrain.ams.client.snapshots import snapshot as snapshot_module
from geartrain.ams.client.writes import ClientStream, WriteStream
from geartrain.ams.kernels._core import PreparedWrite, RowsClient
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.data_plane import DataPlane
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.client.silence import SilenceLog
from geartrain.ams.rpc.status import abort, error_from
from geartrain.ams.scheduler.data_streams import StreamLeases
from geartrain.ams.scheduler.handlers import SchedulerHandlers
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.scheduler.worker_steps import WorkerSteps
from geartrain.ams.server.chunked_writes import PartBuffer
from geartrain.ams.server.service import ShardService
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.durable import Disk, disk
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.storage.snapshot.roots import SnapshotRoots
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.placement import buckets_of_shard, split_by_shard
from geartrain.ams.values.scheduler_messages import DescribeCluster
from geartrain.ams.values.shard_messages import Assign, CallContext, Done, Push
from geartrain.ams.values.specs import TableSpec
from tests.support.message_rows import outcome_of, pull_message, pulled, spans, write_messages

Fate = Literal["deliver", "lose", "late", "lose reply", "twice", "and again later"]
FATES: tuple[Fate, ...] = ("deliver", "lose", "late", "lose reply", "twice", "and again later")
FAULTY = ("Pull", "Push", "Assign", "Freeze", "WriteFrozen", "Thaw", "Restore")
"""What meets fates. Not the making and removing of tables: a late DropTable removes whatever has that name now."""
PART_BYTES = 64
PAUSE_SECONDS = 0.06
CONFIG = ClientConfig(attempt_timeout_seconds=1.0, recovery_timeout_seconds=0.2, snapshot_timeout_seconds=1.0)


class Clock:
    """Time that passes only between a client's attempts."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass(frozen=True)
class Message:
    """One call, as it travels."""

    address: str
    method: str
    data: bytes


class Failure(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """How gRPC reports a call that did not succeed."""

    def __init__(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata

    def initial_metadata(self) -> Any: ...
    def is_active(self) -> bool: ...
    def time_remaining(self) -> float: ...
    def cancel(self) -> None: ...
    def add_callback(self, callback: Callable[[], None]) -> bool: ...


Watch = Callable[[Message, Callable[[], bytes]], bytes]


class Network:
    """Carries calls to services by address. The next calls meet the fates in ``script``; after those all is well."""

    def __init__(self, watch: Watch) -> None:
        self.services: dict[str, ShardService] = {}
        self.script: deque[Fate] = deque()
        self.late: list[Message] = []
        """Copies that may still arrive."""
        self._watch = watch

    def call(self, message: Message) -> bytes:
        fate = self.script.popleft() if self.script and message.method in FAULTY else "deliver"
        if fate in ("late", "and again later"):
            self.late.append(message)
        if fate in ("lose", "late"):
            raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED)
        if fate == "twice":
            self.deliver_quietly(message)
        reply = self.deliver(message)
        if fate == "lose reply":
            raise Failure(grpc.StatusCode.UNAVAILABLE, "socket closed")
        return reply

    def deliver(self, message: Message) -> bytes:
        service = self.services.get(message.address)
        if service is None:
            raise Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return self._watch(message, lambda: _answered(service, message))

    def deliver_quietly(self, message: Message) -> None:
        """Deliver a message whose sender does not listen any more."""
        with contextlib.suppress(Failure):
            self.deliver(message)

    def channel(self, address: str, options: Any = None) -> Any:  # noqa: ARG002
        return _Channel(self, address)


def _answered(service: ShardService, message: Message) -> bytes:
    context = _ServicerContext()
    try:
        return service.bound.methods[message.method](message.data, context)  # type: ignore[no-any-return]
    except GeartrainError as error:
        abort(context, error)  # type: ignore[arg-type]


class _ServicerContext:
    def __init__(self) -> None:
        self._metadata: Any = ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Failure(code, details, self._metadata)

    def add_callback(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002
        return True


class _Channel:
    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    def unary_unary(self, path: str) -> _Method:
        return _Method(self._network, self._address, path.rsplit("/", 1)[1])

    def close(self) -> None: ...


class _Method:
    def __init__(self, network: Network, address: str, name: str) -> None:
        self._network, self._address, self._name = network, address, name

    def __call__(self, data: bytes, timeout: float | None = None, metadata: Any = None) -> bytes:  # noqa: ARG002
        return self._network.call(Message(self._address, self._name, data))

    def future(self, data: bytes, timeout: float | None = None, metadata: Any = None) -> Future[bytes]:  # noqa: ARG002
        done: Future[bytes] = Future()
        try:
            done.set_result(self(data, timeout))
        except Failure as failure:
            done.set_exception(failure)
        return done


class Died(BaseException):
    """The process that calls the disk ends here."""


class FaultyDisk:
    """Counts the calls to the disk and lets the one numbered ``at`` fail; without a medium below, syncs are free."""

    CALLS = ("create_folder", "write", "sync", "rename", "remove_folder")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.error: Callable[[], BaseException] = Died
        self.has_failed = False
        self._count = 0
        for name in self.CALLS:
            patch.setattr(disk, name, self._counted(name))

    def arm(self, at: int | None, error: Callable[[], BaseException]) -> None:
        self.at, self.error, self._count, self.has_failed = at, error, 0, False

    def _counted(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self._count += 1
            fails = self.at is not None and self._count == self.at
            if fails and name == "write":
                file: BinaryIO = args[0]
                Disk.write(disk, file, args[1][: len(args[1]) // 2])
            if fails:
                self.has_failed = True
                raise self.error()
            if name != "sync":
                getattr(Disk, name)(disk, *args)

        return call


class MessageRows(RowsClient):
    """A client's rows in messages, as those of other languages are: so they meet the fates of the network."""

    network: Network
    writes: ClassVar[dict[int, tuple[PreparedWrite, str, bool]]] = {}
    """Table, and whether it is an assign, of each that was prepared."""

    def __init__(self, bucket_shards: np.ndarray, num_shards: int) -> None:
        super().__init__(bucket_shards, num_shards)
        self._map, self._num_shards = bucket_shards, num_shards
        self._incarnations: dict[int, int] = {}
        self._version = 0

    def set_endpoint(self, shard: int, incarnation: int, *_: Any) -> None:
        self._incarnations[shard] = incarnation

    def set_cluster_version(self, version: int) -> None:
        self._version = version

    def _meant(self, shard: int, context: CallContext) -> CallContext:
        return replace(context, shard_incarnation=self._incarnations[shard], cluster_version=self._version)

    def _call(self, shard: int, method: str, data: bytes) -> bytes:
        return self.network.call(Message(f"s{shard}:1", method, data))

    def pull(  # type: ignore[override]
        self, table: Any, incarnation: int, ids: np.ndarray, out: np.ndarray, *rest: Any
    ) -> list[tuple[int, Any]] | None:
        _, present, _, _, _, *only = rest
        left: list[tuple[int, Any]] = []
        for shard, where in split_by_shard(ids, self._map, self._num_shards, dense=table.is_dense):
            if only and only[0] and shard not in only[0]:
                continue
            places = np.arange(len(ids)) if where is None else where
            context = self._meant(shard, CallContext(table_incarnation=incarnation))
            try:
                for start, end in spans(len(places), out.shape[1] * out.itemsize + 8, PART_BYTES):
                    part = places[start:end]
                    data = pull_message(table.name, ids[part], out.dtype, context, present=present is not None)
                    rows, exist = np.empty((len(part), out.shape[1]), out.dtype), np.empty(len(part), np.uint8)
                    pulled(self._call(shard, "Pull", data), rows, None if present is None else exist)
                    out[part] = rows
                    if present is not None:
                        present[part] = exist
            except Failure as failure:
                left.append((shard, _outcome(error_from(failure, "shard"))))
        return left or None

    def write(self, calls: Any, _: float, __: Any) -> list[Any]:
        replies = []
        for prepared, (stream, incarnation, sequence, oldest, table_incarnation), shards in calls:
            context = CallContext(
                stream=stream,
                incarnation=incarnation,
                sequence=sequence,
                oldest_unacknowledged=oldest,
                table_incarnation=table_incarnation,
            )
            _, table, is_assign = self.writes[id(prepared)]
            outcomes: list[Any] = []
            for index, shard in enumerate(prepared.shards):
                if shard not in shards:
                    continue
                _, ids, rows, *_ = prepared.part(index)
                write = (
                    Assign(table=table, ids=ids, rows=rows) if is_assign else Push(table=table, ids=ids, gradients=rows)
                )
                method = type(write).__name__
                messages = write_messages(write, self._meant(shard, context), PART_BYTES)
                sent = [_sent(partial(self._call, shard, method, data)) for data in messages]
                outcomes.append(_outcome(outcome_of(type(write), sent)))
            all_done = all(isinstance(outcome, tuple) for outcome in outcomes)
            replies.append((sum(n for n, _ in outcomes), any(d for _, d in outcomes)) if all_done else outcomes)
        return replies


def _sent(call: Callable[[], bytes]) -> Callable[[], bytes]:
    """Make a call now; what is returned gives its reply, or raises."""
    future: Future[bytes] = Future()
    try:
        future.set_result(call())
    except Failure as failure:
        future.set_exception(failure)
    return future.result


def _outcome(said: Any) -> Any:
    """As compiled code says it: False: no reply came."""
    return (
        (said.created, said.duplicate)
        if isinstance(said, Done)
        else said
        if isinstance(said, GeartrainError)
        else False
    )


class SimulatedCluster:
    """A scheduler and shards at the addresses ``s0:1``, ``s1:1``, … of a network. Incarnations count upwards."""

    def __init__(self, network: Network, clock: Clock, num_shards: int, next_incarnation: Callable[[], int]) -> None:
        self.network, self.clock, self.num_shards = network, clock, num_shards
        self._next_incarnation = next_incarnation
        self.scheduler = Scheduler(num_shards, self.open_carrier, lease_seconds=1e9, clock=clock.monotonic)
        self.shards: dict[int, Shard] = {}
        """Those that live."""
        for number in range(num_shards):
            self.start(number)

    @staticmethod
    def open_carrier(address: str, _: int) -> GrpcCarrier:
        return GrpcCarrier(address, part_bytes=PART_BYTES)

    def start(self, number: int) -> Shard:
        """Start a shard without rows, as a server does."""
        incarnation = self._next_incarnation()
        registration = self.scheduler.register(f"s{number}:1", number, incarnation)
        shard = Shard(
            number,
            buckets_of_shard(registration.bucket_map.bucket_shards, number),
            incarnation=incarnation,
            cluster_version=registration.cluster_version,
            clock=self.clock.monotonic,
        )
        service = ShardService(1 << 20, SnapshotRoots("server", "127.0.0.1:0", ["/"]))  # nobody is at the other end
        service._parts = PartBuffer(clock=self.clock.monotonic)
        service.serve(shard)
        self.shards[number] = shard
        self.network.services[f"s{number}:1"] = service
        return shard

    def kill(self, number: int) -> None:
        """The shard's memory is gone; its address answers no more."""
        self.network.services.pop(f"s{number}:1", None)
        self.shards.pop(number).close()

    def beat(self) -> None:
        """Every shard learns the cluster version, as from a heartbeat."""
        for number, shard in self.shards.items():
            shard.cluster_version = self.scheduler.heartbeat(number, shard.incarnation).cluster_version

    def close(self) -> None:
        for number in list(self.shards):
            self.kill(number)


class OneStream(WriteStream):
    """The same numbers for all tables, so that a successor can take them over."""

    def numbers(self, table: str, sequence: int | None) -> WriteStream:  # noqa: ARG002
        return self


class Client:
    """One process that writes: a cluster handle with a stream of its own, whose background work waits to be stepped."""

    def __init__(self, cluster: SimulatedCluster, stream: str, incarnation: int) -> None:
        carrier = LocalScheduler(
            SchedulerHandlers(cluster.scheduler, StreamLeases(MemoryStore(), 1e9), WorkerSteps(1e9))
        )
        view = carrier.call(DescribeCluster(), None)
        self.cluster = Cluster(carrier, view, cluster.open_carrier, CONFIG, stream=ClientStream(8), remote=True)
        self.stream = OneStream(8, stream, incarnation)
        self.tells_tables_apart = incarnation // 2 % 2 == 0
        """Else it is of an earlier version, or not ours, and sends no incarnations of tables."""
        self.opened: dict[str, TableSpec] = {}
        """Tables as they were when it opened them."""
        self.deferred: deque[Callable[[], None]] = deque()
        self.cluster._calls.background = self._background  # type: ignore[method-assign]

    def _background(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*arguments, **keywords))
            except BaseException as exc:
                future.set_exception(exc)

        self.deferred.append(work)
        return future


def inject(patch: pytest.MonkeyPatch, network: Network, clock: Clock) -> FaultyDisk:
    """Put network, clock and disk in the place of the real ones."""
    patch.setattr(grpc, "insecure_channel", network.channel)
    patch.setattr(snapshot_module._Hold, "start", lambda _: None)  # time does not pass while a snapshot is written
    patch.setattr(SilenceLog, "check", lambda *_: None)  # which measures real time

    def pause(backoff: Any, at_least_seconds: float = 0.0) -> bool:  # noqa: ARG001
        backoff._began = backoff._began or clock.now
        if clock.now >= backoff._began + CONFIG.recovery_timeout_seconds:
            return False
        clock.now += PAUSE_SECONDS
        return True

    patch.setattr(Backoff, "pause", pause)
    send_rows_in_messages(patch, network)
    return FaultyDisk(patch)


def send_rows_in_messages(patch: pytest.MonkeyPatch, network: Network) -> None:
    """Instead of over connections of their own."""

    def prepared(client: Any, facts: Any, *arguments: Any, **settings: Any) -> PreparedWrite:
        made = PreparedWrite(client, facts, *arguments, **settings)
        MessageRows.writes[id(made)] = made, facts.name, settings["is_assign"]
        return made

    patch.setattr(table_module, "PreparedWrite", prepared)
    patch.setattr(MessageRows, "network", network, raising=False)
    patch.setattr(MessageRows, "writes", {})
    patch.setattr(retries, "RowsClient", MessageRows)
    patch.setattr(DataPlane, "connect", lambda *_: None)
    patch.setattr(DataPlane, "may_go_on", lambda _, *, is_late: is_late)
