"""What a token gives: every RPC and both ways of rows, with tokens that must be refused and those that must not."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.graph.client.remote import RemoteGraphs
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.rpc.server.access import CALLERS
from geartrain.ams.rpc.server.rights import NO_TOKEN, RIGHT_OF
from geartrain.ams.rpc.services import SCHEDULER, SHARD
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import (
    CERTIFIED_ROLES,
    CLIENT,
    FOLDER_VARIABLE,
    TOKEN_VARIABLE,
    GraphConfig,
    SchedulerConfig,
    SecurityConfig,
    identify,
    identity,
)
from geartrain.ams.values.errors import AccessDenied, ConfigError
from geartrain.ams.values.scheduler_messages import DescribeJobs, FenceJob
from geartrain.ams.values.shard_messages import Freeze, Thaw, WriteFrozen
from geartrain.launch import doctor
from geartrain.launch.certificates import create_authority, issue
from geartrain.launch.connected.graph_role import ConnectedCluster
from geartrain.launch.tokens import create_token, revoke
from tests.integration.conftest import QUICK
from tests.integration.gear.gear_cluster import gear_cluster
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens
from tests.support.role_process import RoleProcess

ALL = ["*=read,write,create,snapshot,admin"]
MINE = ["mine/*=read,write,create,snapshot"]
S1, S2, S3 = ("1" * 32, "2" * 32, "3" * 32)
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_BY_ROLE = {
    "scheduler": (scheduler_pb2, "Scheduler"),
    "server": (shard_pb2, "Shard"),
    "graph": (graph_pb2, "Graph"),
    "slowgear": (gear_pb2, "Gear"),
}
RPCS = [
    (role, f"/{service.full_name}/{method.name}", method)
    for role, (file, name) in _BY_ROLE.items()
    for service in (file.DESCRIPTOR.services_by_name[name],)
    for method in service.methods
    if CLIENT in CALLERS[f"/{service.full_name}/{method.name}"]
]
GUARDED = [rpc for rpc in RPCS if rpc[1] not in NO_TOKEN]
Roles = Mapping[str, str]
PART = {"module": "build", "samples": "samples"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, of this process one that is every role but a client, and the tokens of the tests."""
    folder = tmp_path_factory.mktemp("certificates")
    create_authority(folder, "test")
    for role in CERTIFIED_ROLES:
        issue(folder, folder, [role])
    create_authority(folder / "other", "test")
    issue(folder / "other", folder / "other", [CLIENT])
    create_token(folder, "boss", ALL, 1)
    create_token(folder, "mine", MINE, 1)
    create_token(folder, "reader", ["mine/*=read"], 1)
    create_token(folder, "writer", ["mine/*=write"], 1)
    create_token(folder, "late", ALL, 1e-9)
    create_token(folder / "other", "foreign", ALL, 1, folder / "foreign.token")
    revoke(folder, create_token(folder, "revoked", ALL, 1)[1])
    return folder


@pytest.fixture(scope="module")
def roles(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """One process of each role, by its address."""
    before = identity("127.0.0.1:1")
    with ExitStack() as stack:
        stack.callback(identify, *before)
        own = tmp_path_factory.mktemp("roles")
        issue(folder, own, ["scheduler", "server", "graph", "slowgear"])
        (own / "revoked").unlink()
        (own / "revoked").symlink_to(folder / "revoked")
        identify(str(own), "scheduler")
        cluster = stack.enter_context(gear_cluster())
        _, gear = cluster.start_gear()
        graph = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(cluster.address, QUICK))
        addresses = {"scheduler": cluster.address, "slowgear": gear, "graph": graph.start()}
        stack.callback(graph.stop, 0)
        with gt.connect(cluster.address) as connected:
            addresses["server"] = connected._calls.view.shards[0].address
        yield addresses


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[RoleProcess]:
    """A cluster of its own processes, with two tables."""
    before = identity("127.0.0.1:1")
    up = ("up", "--json", "--shards=1", "--scheduler-listen=127.0.0.1:0")
    with RoleProcess(*up, **{FOLDER_VARIABLE: str(folder)}) as process:
        identify(str(folder), CLIENT, str(folder / "boss.token"))
        with gt.connect(process.facts["scheduler"]) as connected:
            for name in ("mine/rows", "other/rows"):
                connected.create_table(name, dim=4, optimizer=gt.SGD(1.0))
        identify(*before)
        yield process


@pytest.fixture
def address(process: RoleProcess) -> str:
    return str(process.facts["scheduler"])


@pytest.fixture
def as_program(folder: Path) -> Iterator[Callable[[str | None], None]]:
    """Lets this process be a program with a token."""
    before = identity("127.0.0.1:1")
    yield lambda name: identify(str(folder), CLIENT, None if name is None else str(folder / f"{name}.token"))
    identify(*before)


def opened(folder: Path, roles: Roles, role: str) -> grpc.Channel:
    own = (folder / "client.pem").read_bytes()
    shown = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), own, own)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", f"{role}.test.geartrain")]
    return grpc.secure_channel(roles[role], shown, options)


def outcome(channel: grpc.Channel, path: str, streams: bool, token: str | None, data: bytes = b"") -> grpc.StatusCode:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    try:
        if streams:
            next(iter(channel.unary_stream(path)(data, timeout=2, metadata=metadata)), None)  # type: ignore[call-overload]
        else:
            channel.unary_unary(path)(data, timeout=10, metadata=metadata)  # type: ignore[call-overload]
    except grpc.RpcError as exc:
        assert isinstance(exc, grpc.Call)
        if exc.code() in REFUSED and not exc.trailing_metadata():
            assert not exc.details()
            return grpc.StatusCode.PERMISSION_DENIED
        return exc.code() if exc.code() not in REFUSED else grpc.StatusCode.ABORTED
    return grpc.StatusCode.OK


def shard_at(address: str) -> str:
    with gt.connect(address) as connected:
        return str(connected._calls.view.shards[0].address)


def text_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.token").read_text().strip()


def of_table(method: object, table: str, job: str) -> bytes:
    """A request for a table, of a job, and nothing else."""
    message = method.input_type._concrete_class()  # type: ignore[attr-defined]
    for field in message.DESCRIPTOR.fields_by_name:
        if field in ("table", "name"):
            setattr(message, field, table)
        elif field == "job":
            message.job = job
        elif field in ("reader", "who"):
            getattr(message, field).job = job
        elif field == "caller":
            message.caller.stream = f"{job}/rank0"
        elif field == "context":
            message.context.stream = job
        elif field == "spec":
            message.spec.name = table
        elif field == "tables":
            try:
                message.tables.append(table)
            except TypeError:
                message.tables.add(table=table)
    return bytes(message.SerializeToString())


def test_every_rpc_of_clients_has_its_right() -> None:
    assert {path for _, path, _ in GUARDED} == set(RIGHT_OF)


@pytest.mark.parametrize("name", [None, "foreign", "late", "revoked", "damaged"])
def test_no_rpc_of_any_role_is_open_to_a_client_with(name: str | None, roles: Roles, folder: Path) -> None:
    token = (
        None if name is None else text_of(folder, "boss")[:-4] + "AAAA" if name == "damaged" else text_of(folder, name)
    )
    with ExitStack() as stack:
        ways = {role: stack.enter_context(opened(folder, roles, role)) for role in _BY_ROLE}
        codes = {path: outcome(ways[role], path, m.server_streaming, token) for role, path, m in GUARDED}
        assert set(codes.values()) == {grpc.StatusCode.PERMISSION_DENIED}, codes
        pinged = {outcome(ways[role], path, False, token) for role, path, _ in RPCS if path in NO_TOKEN}
    assert pinged == {grpc.StatusCode.OK}


def test_a_token_gives_its_rights_to_its_tables_and_no_others(roles: Roles, folder: Path) -> None:
    boss, mine, reader = (text_of(folder, name) for name in ("boss", "mine", "reader"))
    wrong = []
    with ExitStack() as stack:
        ways = {role: stack.enter_context(opened(folder, roles, role)) for role in _BY_ROLE}
        for role, path, method in GUARDED:
            streams, right = method.server_streaming, RIGHT_OF[path]
            own, other = of_table(method, "mine/none", "mine"), of_table(method, "other/none", "mine")
            foreign, least = of_table(method, "mine/none", "yours"), of_table(method, "mine/none", "reader")
            names_tables = own != other
            expected = {
                "boss": (boss, other, True),
                "own": (mine, own, right != "admin"),
                "another's": (mine, other, right != "admin" and not names_tables),
                "another job's": (mine, foreign, right != "admin" and own == foreign),
                "less": (reader, least, right in ("any", "read")),
            }
            for what, (token, request, may) in expected.items():
                if right == "create" and may:  # what comes of it the scheduler tells
                    request = request + b"\xff"
                    if what != "boss":
                        continue
                code = outcome(ways[role], path, streams, token, request)
                if (code is grpc.StatusCode.PERMISSION_DENIED) is may:
                    wrong.append((path, what, code))
    assert not wrong


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "tcp"])
def test_rows_are_read_and_written_by_the_rights_of_the_token(
    shared_memory: bool, address: str, as_program: Callable[[str | None], None]
) -> None:
    config = QUICK.model_copy(update={"shared_memory": shared_memory})
    ones = np.ones((1, 4), np.float32)
    as_program("boss")
    with gt.connect(address, config=config) as cluster:
        before = cluster.table("mine/rows").pull([7])
        cluster.table("other/rows").pull([7])
    as_program("reader")
    with gt.connect(address, config=config) as cluster:
        table = cluster.table("mine/rows")
        assert np.array_equal(table.pull([7]), before)
        for refused in (
            lambda: table.push([7], ones),
            lambda: table.assign([7], ones),
            lambda: table.remove([7]),
            lambda: cluster.table("other/rows").pull([7]),
            lambda: cluster.drop_table("mine/rows"),
            lambda: cluster.create_table("mine/more", dim=4, optimizer=gt.SGD(1.0)),
        ):
            with pytest.raises(AccessDenied, match=r"geartrain certs token.*security\.token"):
                refused()
        assert np.array_equal(table.pull([7]), before)
    as_program("writer")
    with gt.connect(address, config=config) as cluster:
        table = cluster.table("mine/rows")
        table.push([7], ones)
        for refused in (lambda: table.pull([7]), lambda: cluster.table("other/rows").push([7], ones)):
            with pytest.raises(AccessDenied, match=r"geartrain certs token"):
                refused()
    as_program("boss")
    with gt.connect(address, config=config) as cluster:
        assert np.allclose(cluster.table("mine/rows").pull([7]), before - 1)


def test_who_lacks_a_right_hears_of_the_token_that_it_has(
    roles: Roles, folder: Path, as_program: Callable[[str | None], None]
) -> None:
    as_program("reader")
    graph = RemoteGraphs(roles["graph"], QUICK)
    with pytest.raises(AccessDenied, match=rf"{folder}/reader\.token: .* does not give the right"):
        graph.build("mine/rows", 4)
    as_program(None)
    stranger = RemoteGraphs(roles["graph"], QUICK)
    with pytest.raises(AccessDenied, match=r"has no token.*name its file in security\.token"):
        stranger.build("mine/rows", 4)
    graph.close()
    stranger.close()


def test_doctor_of_a_refused_token_says_where_the_reason_is(
    address: str, as_program: Callable[[str | None], None]
) -> None:
    as_program("foreign")
    (found,) = doctor.check_cluster(address)
    assert (found.state, "signed by a key of another cluster" in found.found) == ("fail", True), found
    assert "log of its scheduler" in found.remedy and "geartrain up" not in found.remedy


def test_a_token_that_no_role_wants_is_told_of_once(
    folder: Path, tmp_path: Path, as_program: Callable[[str | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    issue(folder, tmp_path, ["scheduler"])
    (tmp_path / "token.pub").unlink()
    identify(str(tmp_path), "scheduler")
    scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0"))
    address = scheduler.start()
    as_program("foreign")
    try:
        calls = GrpcSchedulerCarrier(address, max_message_bytes=1 << 20)
        for _ in range(2):
            calls.call(DescribeJobs(), 10.0)
        calls.close()
    finally:
        scheduler.stop(0)
    assert caplog.text.count("shows a token, which limits nothing") == 1


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("how", ["revoked", "ran out"])
def test_a_connection_for_rows_ends_with_its_token(
    how: str,
    shared_memory: bool,
    address: str,
    folder: Path,
    as_program: Callable[[str | None], None],
) -> None:
    days = 1.0 if how == "revoked" else 4 / 86_400
    _, token_id = create_token(folder, "short", MINE, days, folder / f"{how}{shared_memory}.token")
    began = time.monotonic()
    as_program(f"{how}{shared_memory}")
    with gt.connect(address, config=QUICK.model_copy(update={"shared_memory": shared_memory})) as cluster:
        table = cluster.table("mine/rows")
        table.pull([1])
        if how == "revoked":
            revoke(folder, token_id)
            began = time.monotonic()
        with pytest.raises(AccessDenied):
            while time.monotonic() < began + (3 if how == "revoked" else 6):  # 1 s, and what else the machine does
                table.pull([1])
                time.sleep(0.02)
        with pytest.raises(AccessDenied):
            table.pull([1])


def test_a_token_that_is_revoked_at_the_scheduler_is_believed_nowhere(
    folder: Path, tmp_path: Path, as_program: Callable[[str | None], None]
) -> None:
    """Each role has a folder of its own, as on a machine of its own."""
    revoked, token_id = create_token(folder, "mine", MINE, 1, folder / "caught.token")
    text = revoked.read_text().strip()
    for role in _BY_ROLE:
        issue(folder, tmp_path / role, [role])
        shutil.copy(folder / "token.pub", tmp_path / role)
    part = ("--name=image", "--dim=4", *(f"--{w}=tests.integration.gear.gear_part:{n}" for w, n in PART.items()))

    def started(role: str, *more: str) -> RoleProcess:
        return RoleProcess(role, "--listen=127.0.0.1:0", *more, **{FOLDER_VARIABLE: str(tmp_path / role)})

    def codes(addresses: Mapping[str, str], token: str) -> set[grpc.StatusCode]:
        """Of each RPC of clients at each role."""
        with ExitStack() as ways:
            by_role = {role: ways.enter_context(opened(folder, addresses, role)) for role in addresses}
            asked = [(by_role[role], path, method) for role, path, method in GUARDED if role in by_role]
            return {outcome(way, path, method.server_streaming, token) for way, path, method in asked}

    with ExitStack() as stack:
        scheduler = stack.enter_context(started("scheduler", "--num-shards=1"))
        to = f"--scheduler={scheduler.address}"
        server = stack.enter_context(started("server", to))
        others = {
            role: stack.enter_context(started(role, to, *more)) for role, more in (("graph", ()), ("slowgear", part))
        }
        roles = {
            role: process.address for role, process in (others | {"scheduler": scheduler, "server": server}).items()
        }
        as_program("boss")
        boss = stack.enter_context(gt.connect(scheduler.address, config=QUICK))
        boss.create_table("mine/rows", dim=4, optimizer=gt.SGD(1.0))
        as_program("caught")
        connected = [
            stack.enter_context(gt.connect(scheduler.address, config=QUICK.model_copy(update={"shared_memory": near})))
            for near in (True, False)
        ]
        tables = [cluster.table("mine/rows") for cluster in connected]
        for table in tables:
            table.pull([1])
        for role, address in roles.items():
            assert grpc.StatusCode.PERMISSION_DENIED not in codes({role: address}, text_of(folder, "boss")), role
        revoke(tmp_path / "scheduler", token_id)
        until = time.monotonic() + 10  # 2 s, and what else the machine does
        for table in tables:
            with pytest.raises(AccessDenied):
                while time.monotonic() < until:
                    table.pull([1])
                    time.sleep(0.02)
        while codes(roles, text) != {grpc.StatusCode.PERMISSION_DENIED}:
            assert time.monotonic() < until
        boss.table("mine/rows").pull([1])
        # Who begins now knows it before it serves.
        server.process.terminate()
        assert server.process.wait(20) == 0
        again = stack.enter_context(started("server", to))
        assert codes({"server": again.address}, text) == {grpc.StatusCode.PERMISSION_DENIED}
        # And nobody forgets it with the scheduler.
        scheduler.process.kill()
        scheduler.process.wait(20)
        time.sleep(2)
        left = {"server": again.address, "graph": roles["graph"], "slowgear": roles["slowgear"]}
        assert codes(left, text) == {grpc.StatusCode.PERMISSION_DENIED}


def test_a_freeze_is_written_by_who_may_save_all_its_tables(
    address: str, as_program: Callable[[str | None], None], tmp_path: Path
) -> None:
    as_program("boss")
    shard = shard_at(address)
    boss = GrpcCalls(SHARD, "shard", shard)
    boss.call(Freeze(snapshot_id=S1, tables=("mine/rows", "other/rows")), 10)
    as_program("mine")
    mine = GrpcCalls(SHARD, "shard", shard)
    for request in (
        WriteFrozen(snapshot_id=S1, folder=str(tmp_path)),
        Thaw(snapshot_id=S1, kept=False),
        Freeze(snapshot_id=S2),
        Freeze(snapshot_id=S1, tables=("mine/rows",)),
    ):
        with pytest.raises(AccessDenied):
            mine.call(request, 10)
    mine.call(Freeze(snapshot_id=S3, tables=("mine/rows",)), 10)
    mine.call(Thaw(snapshot_id=S3, kept=False), 10)
    boss.call(Thaw(snapshot_id=S1, kept=False), 10)
    boss.close()
    mine.close()


def test_own_tables_are_saved_and_restored(
    address: str, as_program: Callable[[str | None], None], tmp_path: Path
) -> None:
    as_program("mine")
    with gt.connect(address, config=QUICK) as cluster:
        table = cluster.create_table("mine/kept", dim=4, optimizer=gt.SGD(1.0))
        table.assign([3], np.ones((1, 4), np.float32))
        saved = cluster.snapshot(tmp_path, tables=["mine/kept"]).result()
        table.assign([3], np.zeros((1, 4), np.float32))
        cluster.restore(saved, replace=True)
        assert cluster.table("mine/kept").pull([3]).sum() == 4
        with pytest.raises(AccessDenied):
            cluster.snapshot(tmp_path).result()
    as_program("boss")
    with gt.connect(address, config=QUICK) as cluster:
        whole = cluster.snapshot(tmp_path, tables=["mine/kept", "other/rows"]).result()
    as_program("mine")
    with gt.connect(address, config=QUICK) as cluster, pytest.raises(AccessDenied):
        cluster.restore(whole, tables=["other/rows"], replace=True)


def test_a_token_speaks_for_its_job_alone(address: str, as_program: Callable[[str | None], None]) -> None:
    as_program("mine")
    calls = GrpcCalls(SCHEDULER, "scheduler", address)
    with pytest.raises(AccessDenied):
        calls.call(FenceJob(job="yours", incarnation=1), 10)
    with pytest.raises(AccessDenied):
        calls.call(FenceJob(job="", incarnation=1), 10)
    calls.call(FenceJob(job="mine/rank0", incarnation=1), 10)
    calls.close()
    with pytest.raises(AccessDenied):
        gt.connect(address, config=QUICK, stream="yours/rank0")
    with gt.connect(address, config=QUICK, stream="mine/rank0") as cluster:
        cluster.table("mine/rows").push([1], np.ones((1, 4), np.float32))


def test_refused_calls_and_those_that_change_tables_are_audited(
    folder: Path, as_program: Callable[[str | None], None]
) -> None:
    up = ("up", "--json", "--shards=1", "--scheduler-listen=127.0.0.1:0")
    with RoleProcess(*up, **{FOLDER_VARIABLE: str(folder)}) as process:
        address = process.facts["scheduler"]
        as_program("boss")
        with gt.connect(address, config=QUICK) as cluster:
            cluster.create_table("mine/rows", dim=4, optimizer=gt.SGD(1.0))
        as_program("reader")
        with gt.connect(address, config=QUICK) as cluster:
            with pytest.raises(AccessDenied):
                cluster.drop_table("mine/rows")
            with pytest.raises(AccessDenied):
                cluster.table("mine/rows").push([1], np.ones((1, 4), np.float32))
            time.sleep(1.5)
        process.process.terminate()
        said = process.process.communicate(timeout=20)[1]
    lines = [json.loads(line[line.index("{") :]) for line in said.splitlines() if " geartrain.audit: " in line]
    told = [(line["rpc"].rpartition("/")[2], line["job"], line["tables"], line["allowed"]) for line in lines]
    assert ("CreateClusterTable", "boss", ["mine/rows"], True) in told
    assert ("DropClusterTable", "reader", ["mine/rows"], False) in told
    assert ("rows", "reader", ["mine/rows"], False) in told
    assert all(line.keys() >= {"time", "caller", "token", "peer", "reason"} for line in lines)
    assert "gt1." not in said


def test_a_program_takes_up_a_new_token_without_a_restart(
    address: str, folder: Path, as_program: Callable[[str | None], None]
) -> None:
    path, _ = create_token(folder, "reader", ["mine/*=read"], 1, folder / "changes.token")
    as_program("changes")
    with gt.connect(address, config=QUICK) as cluster:
        with pytest.raises(AccessDenied):
            cluster.create_table("mine/changes", dim=4, optimizer=gt.SGD(1.0))
        create_token(folder, "reader", MINE, 1, path)
        time.sleep(1.1)
        cluster.create_table("mine/changes", dim=4, optimizer=gt.SGD(1.0))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "tcp"])
def test_a_token_that_is_made_anew_before_it_runs_out_costs_no_step(
    shared_memory: bool, address: str, folder: Path, as_program: Callable[[str | None], None]
) -> None:
    name = f"renewed{shared_memory}"
    path = folder / f"{name}.token"
    create_token(folder, "renewed", MINE, 8 / 86_400, path)
    as_program(name)
    with gt.connect(address, config=QUICK.model_copy(update={"shared_memory": shared_memory})) as cluster:
        table = cluster.table("mine/rows")
        before, steps = table.pull([9]), 0
        until = renew_at = time.monotonic() + 1
        until += 9
        while time.monotonic() < until:
            if time.monotonic() > renew_at:
                create_token(folder, "renewed", MINE, 8 / 86_400, path)
                renew_at += 1
            table.push([9], np.ones((1, 4), np.float32))
            steps += 1
            time.sleep(0.002)
        assert np.allclose(table.pull([9]), before - steps)


def test_a_worker_trains_and_saves_with_the_token_of_its_own_tables(
    address: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_token(folder, "run~*", ["run~*=read,write,create,snapshot"], 1, folder / "run.token")
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    films = write_movielens(tmp_path / "films")
    settings = ["--logger=none", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=10"]
    train = ["worker", "ctr", f"--data={films}", f"--out={tmp_path / 'run'}", f"--scheduler={address}", *settings]
    for name, code in (("mine", 1), ("run", 0)):
        monkeypatch.setenv(TOKEN_VARIABLE, str(folder / f"{name}.token"))
        done = typed(*train, "--continue", "--steps=20", f"--snapshots={tmp_path / 'kept'}")
        assert done.returncode == code, done.stderr
        assert ("certs token" in done.stderr) is (code != 0)


def test_what_a_role_needs_no_token_gives_no_client_rights(roles: Roles, folder: Path) -> None:
    """The certificate of a role is no token: a client's call is judged by its own."""
    with opened(folder, roles, "server") as way:
        assert outcome(way, f"/{SHARD.name}/OpenDataPlane", False, None) is grpc.StatusCode.PERMISSION_DENIED


def test_a_foreign_stub_sends_its_token_as_call_credentials(roles: Roles, folder: Path) -> None:
    own = (folder / "client.pem").read_bytes()
    tls = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), own, own)
    for name, code in (("reader", grpc.StatusCode.OK), ("revoked", grpc.StatusCode.PERMISSION_DENIED)):
        both = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(text_of(folder, name)))
        options = [("grpc.ssl_target_name_override", "server.test.geartrain")]
        with grpc.secure_channel(roles["server"], both, options) as channel:
            assert outcome(channel, f"/{SHARD.name}/Describe", False, None) is code


def test_the_commands_make_and_revoke(tmp_path: Path) -> None:
    assert typed("certs", "init", str(tmp_path)).returncode == 0
    done = typed("certs", "token", "ads", str(tmp_path), "--allow=faces/*=read,write", "--allow=*=read", "--days=7")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "ads.token"
    assert done.stdout.startswith(f"{path}: token ")
    assert path.stat().st_mode & 0o777 == 0o600 and (tmp_path / "token.key").stat().st_mode & 0o777 == 0o600
    token_id = done.stdout.split()[2]
    assert typed("certs", "revoke", token_id, str(tmp_path)).returncode == 0
    assert (tmp_path / "revoked").read_text().split() == [token_id]
    for wrong, said in (
        (("token", "ads", str(tmp_path), "--allow=faces=fly"), "--allow is 'faces=fly'"),
        (("token", "ads", str(tmp_path / "none"), "--allow=*=read"), "does not exist"),
        (("revoke", "ads", str(tmp_path)), "'ads' is no id of a token"),
    ):
        done = typed("certs", *wrong)
        assert done.returncode == 2 and said in done.stderr
    text = path.read_text().strip()
    done = typed("status", f"--scheduler={text}")
    assert done.returncode == 2 and "security.token" in done.stderr and text[:40] not in done.stderr


def test_a_token_is_read_from_a_file_of_ones_own(
    folder: Path,
    tmp_path: Path,
    as_program: Callable[[str | None], None],  # noqa: ARG001
) -> None:
    text = text_of(folder, "reader")
    for wrong in (
        lambda: SecurityConfig(token=text),
        lambda: gt.connect(f"{text}@127.0.0.1:7000"),
        lambda: gt.connect(f"127.0.0.1:7000?token={text}"),
    ):
        with pytest.raises(ConfigError, match=r"security\.token") as caught:
            wrong()
        assert text[:40] not in str(caught.value)
    path = tmp_path / "open.token"
    path.write_text(text)
    path.chmod(0o644)
    for place, said in (
        (path, "chmod 600"),
        (tmp_path / "none", "geartrain certs token"),
        (folder / "ca.key", "no token"),
    ):
        identify(str(folder), CLIENT, str(place))
        with pytest.raises(ConfigError, match=said):
            gt.connect("127.0.0.1:1")
    identify("none", CLIENT, str(folder / "reader.token"))
    with pytest.raises(ConfigError, match="only under TLS"):
        gt.connect("127.0.0.1:1")


def test_the_private_folder_of_a_user_has_no_tokens(tmp_path: Path) -> None:
    create_authority(tmp_path, "private")
    issue(tmp_path, tmp_path, [CLIENT, *CERTIFIED_ROLES[:-1]])
    with pytest.raises(ConfigError, match="good for every role"):
        create_token(tmp_path, "job", ALL, 1)
