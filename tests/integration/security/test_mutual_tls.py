"""Who may call what: every RPC of every role, by callers that it must refuse and by those that it must not."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import geartrain as gt
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.pb.v1.wire import WIRE
from geartrain.ams.rpc import channel, credentials
from geartrain.ams.rpc.carrier import CertificateRejected
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.client.health import is_serving
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.credentials import CA_FILE, Credentials
from geartrain.ams.rpc.server import access, silent_connections
from geartrain.ams.rpc.server.access import CALLERS
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.services import SCHEDULER
from geartrain.ams.values.config import (
    CERTIFIED_ROLES,
    CLIENT,
    FOLDER_VARIABLE,
    NO_FOLDER,
    GraphConfig,
    identify,
    identity,
    private_folder,
    split_address,
)
from geartrain.ams.values.errors import AccessDenied, ConfigError, ShardUnavailable
from geartrain.ams.values.rpc import Ping
from geartrain.ams.values.scheduler_messages import Heartbeat, LeaveCluster
from geartrain.ams.values.shard_messages import Describe
from geartrain.launch import certificates
from geartrain.launch.certificates import create_authority, create_private_folder, issue, renew
from geartrain.launch.connected.graph_role import ConnectedCluster
from geartrain.launch.ports import role_at
from geartrain.launch.tokens import create_token
from tests.integration.conftest import QUICK
from tests.integration.gear.gear_cluster import GearCluster, gear_cluster
from tests.support.command_line import typed
from tests.support.role_process import RoleProcess

SERVICES = {
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    "server": shard_pb2.DESCRIPTOR.services_by_name["Shard"],
    "graph": graph_pb2.DESCRIPTOR.services_by_name["Graph"],
    "slowgear": gear_pb2.DESCRIPTOR.services_by_name["Gear"],
}
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
RPCS = [
    (role, f"/{service.full_name}/{method.name}", method.server_streaming)
    for role, own in SERVICES.items()
    for service in (own, HEALTH)
    for method in service.methods
]
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
SECOND = 1 / 86_400
IDS = range(16)
"""Of both shards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of each role, and in ``all`` one that is every role: that of this process."""
    folder = tmp_path_factory.mktemp("certificates")
    create_authority(folder, "test")
    for role in CERTIFIED_ROLES:
        issue(folder, folder, [role])
    issue(folder, folder / "all", [CLIENT, *CERTIFIED_ROLES])
    issue(folder, folder / "old", [CLIENT], days=-SECOND)
    for other, cluster in (("foreign", "test"), ("namesake", "other")):
        create_authority(folder / other, cluster)
        issue(folder / other, folder / other, [CLIENT])
    # Another cluster's authority is believed, as if it were the same one: its name is not.
    with (folder / "all" / CA_FILE).open("ab") as trusted:
        trusted.write((folder / "namesake" / CA_FILE).read_bytes())
    return folder


@pytest.fixture(scope="module")
def roles(folder: Path) -> Iterator[tuple[GearCluster, Mapping[str, str]]]:
    """One process of each role, by its address."""
    with ExitStack() as stack:
        stack.callback(identify, None)
        identify(str(folder / "all"))
        cluster = stack.enter_context(gear_cluster())
        _, gear = cluster.start_gear()
        graph = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(cluster.address, QUICK))
        addresses = {"scheduler": cluster.address, "slowgear": gear, "graph": graph.start()}
        stack.callback(graph.stop, 0)
        with gt.connect(cluster.address) as connected:
            addresses["server"] = connected._calls.view.shards[0].address
        yield cluster, addresses


def shown(folder: Path | None, role: str, trusted: Path) -> grpc.ChannelCredentials:
    own = None if folder is None else (folder / f"{role}.pem").read_bytes()
    return grpc.ssl_channel_credentials((trusted / CA_FILE).read_bytes(), own, own)


def opened(address: str, role: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", f"{role}.test.geartrain")]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def outcome(channel: grpc.Channel, path: str, streams: bool) -> grpc.StatusCode:
    """How an empty request ends."""
    try:
        if streams:
            next(iter(channel.unary_stream(path)(b"", timeout=1)), None)  # type: ignore[call-overload]
        else:
            channel.unary_unary(path)(b"", timeout=10)  # type: ignore[call-overload]
    except grpc.RpcError as exc:
        assert isinstance(exc, grpc.Call)
        if exc.code() in REFUSED:
            assert not exc.details()
        return exc.code()
    return grpc.StatusCode.OK


def test_every_rpc_is_in_a_list_and_no_list_names_what_is_no_rpc() -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert set(CALLERS) == {path for _, path, _ in RPCS} | {reflection}
    assert all(roles and roles <= set(CERTIFIED_ROLES) for roles in CALLERS.values())


@pytest.mark.parametrize("caller", ["plaintext", "no certificate", "expired", "foreign", "namesake"])
def test_no_rpc_of_any_role_is_open_to(caller: str, roles: tuple[GearCluster, Mapping[str, str]], folder: Path) -> None:
    wrong = {
        "plaintext": lambda: None,
        "no certificate": lambda: shown(None, CLIENT, folder),
        "expired": lambda: shown(folder / "old", CLIENT, folder),
        "foreign": lambda: shown(folder / "foreign", CLIENT, folder),
        "namesake": lambda: shown(folder / "namesake", CLIENT, folder),
    }[caller]
    codes = set()
    with ExitStack() as stack:
        ways = {role: stack.enter_context(opened(address, role, wrong())) for role, address in roles[1].items()}
        codes = {outcome(ways[role], path, streams) for role, path, streams in RPCS}
    known = grpc.StatusCode.UNAUTHENTICATED if caller == "namesake" else grpc.StatusCode.UNAVAILABLE
    assert codes == {known}


@pytest.mark.parametrize("how", ["ran out", "is of an authority that is no longer trusted"])
def test_no_rpc_of_any_role_is_open_by_an_old_connection_whose_certificate(
    how: str,
    roles: tuple[GearCluster, Mapping[str, str]],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusted = folder / "all" / CA_FILE
    before = trusted.read_bytes()
    with ExitStack() as stack:
        stack.callback(trusted.write_bytes, before)
        if how == "ran out":
            issue(folder, tmp_path, [CLIENT], days=1)
        else:
            create_authority(tmp_path, "test")
            issue(tmp_path, tmp_path, [CLIENT])
            trusted.write_bytes(before + (tmp_path / CA_FILE).read_bytes())
        time.sleep(1.1)  # for roles to look
        ways = {
            role: stack.enter_context(opened(address, role, shown(tmp_path, CLIENT, folder)))
            for role, address in roles[1].items()
        }
        for role, way in ways.items():
            assert outcome(way, f"/{SERVICES[role].full_name}/Ping", False) is grpc.StatusCode.OK
        if how == "ran out":
            monkeypatch.setattr(access, "time", SimpleNamespace(time=lambda: time.time() + 86_401))
        else:
            trusted.write_bytes(before)
            time.sleep(1.1)
        codes = {outcome(ways[role], path, streams) for role, path, streams in RPCS}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("caller", CERTIFIED_ROLES)
def test_a_role_may_call_what_its_lists_name_and_nothing_else(
    caller: str, roles: tuple[GearCluster, Mapping[str, str]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    wrong = []
    with ExitStack() as stack:
        ways = {
            role: stack.enter_context(opened(address, role, shown(folder, caller, folder)))
            for role, address in roles[1].items()
        }
        for role, path, streams in RPCS:
            code = outcome(ways[role], path, streams)
            may = caller in CALLERS[path]
            if (code in REFUSED) is may or (not may and code is not grpc.StatusCode.PERMISSION_DENIED):
                wrong.append((path, code))
            if not may:
                refusal = f": {path} (not its role)"
                assert any(f"refused: {caller}/" in told and refusal in told for told in caplog.messages)
    assert not wrong


def test_an_rpc_in_no_list_is_refused_to_every_role(
    roles: tuple[GearCluster, Mapping[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/geartrain.ams.v1.Scheduler/Ping"
    monkeypatch.delitem(CALLERS, path)
    for caller in CERTIFIED_ROLES:
        with opened(roles[1]["scheduler"], "scheduler", shown(folder, caller, folder)) as way:
            assert outcome(way, path, False) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("certified", [True, False])
def test_who_does_not_show_who_it_is_is_not_left_connected(
    certified: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    identify(str(folder / "all") if certified else NO_FOLDER)
    server = GrpcServer("127.0.0.1:0", 1 << 20)
    server.start()
    try:
        with socket.create_connection(split_address(server.address), timeout=10) as silent:
            while silent.recv(1 << 16):  # what a server says first in plain text
                pass
    finally:
        server.stop(0)


def test_who_connects_and_makes_no_call_is_in_the_log_once_a_minute(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_connections, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(silent_connections, "_LOOK_SHARE", float("inf"))
    monkeypatch.setattr(silent_connections, "_GONE_SECONDS", 0.2)
    told = threading.Event()
    monkeypatch.setattr(caplog.handler, "emit", lambda record, emit=caplog.handler.emit: (emit(record), told.set()))
    caplog.set_level(logging.WARNING, silent_connections.__name__)
    identify(str(folder), "scheduler")
    server = GrpcServer("127.0.0.1:0", 1 << 20)
    server.start()
    server.ready()
    try:
        for _ in range(2):  # the second stranger is told of in the next minute
            assert is_serving(server.address)
            with opened(server.address, "scheduler", None) as plain:
                assert outcome(plain, "/grpc.health.v1.Health/Check", False) is grpc.StatusCode.UNAVAILABLE
            assert told.wait(20)
        (record,) = caplog.records
        assert re.search(r"refused: connections to port \d+ from 127\.0\.0\.1 \(1 seen\) ended without", record.message)
    finally:
        server.stop(0)


def test_grpc_complains_of_no_certificate_when_any_role_may_answer(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    identify(str(folder / "all"))
    server = GrpcServer("127.0.0.1:0", 1 << 20)
    server.start()
    server.ready()
    try:
        assert is_serving(server.address)
    finally:
        server.stop(0)
    assert "subdomain" not in capfd.readouterr().err


def test_connections_are_named_as_grpc_names_them() -> None:
    for family, host, name in (
        (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1"),
        (socket.AF_INET6, "::1", "ipv6:%5B::1%5D"),
    ):
        with socket.create_server((host, 0), family=family) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection((host, port)) as there:
                assert silent_connections._connected(port) == {f"{name}:{there.getsockname()[1]}"}


def test_a_client_believes_only_the_role_that_it_asks_for(
    roles: tuple[GearCluster, Mapping[str, str]], folder: Path
) -> None:
    identify(str(folder), "graph")
    server = GrpcServer("127.0.0.1:0", 1 << 20)
    server.start()
    identify(str(folder))
    calls = GrpcCalls(SCHEDULER, "scheduler", server.address)
    with pytest.raises(CertificateRejected, match="of another role, shard or cluster"):
        calls.call(Ping(), 5.0)
    calls.close()
    server.stop(0)
    with pytest.raises(grpc.RpcError) as caught, opened(roles[1]["graph"], "x", shown(folder, CLIENT, folder)) as way:
        way.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)  # type: ignore[call-overload]
    assert "Hostname Verification" in str(caught.value.details())  # type: ignore[attr-defined]
    pong = role_at(roles[1]["graph"])
    assert pong is not None and pong.role == "graph"
    assert all(is_serving(address) for address in roles[1].values())
    told = typed("status", f"--scheduler={roles[1]['scheduler']}", "--json")  # names no folder
    assert told.returncode == 1 and "it may want a certificate" in told.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        told = typed("status", f"--scheduler={roles[1]['scheduler']}", "--json")
    assert json.loads(told.stdout)["insecure"] is False


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_graph_service_reads_rows_and_writes_none(
    shared_memory: bool, roles: tuple[GearCluster, Mapping[str, str]], folder: Path
) -> None:
    identify(str(folder / "all"))
    with gt.connect(roles[1]["scheduler"], config=QUICK) as connected:
        table = connected.create_table("read", dim=4, optimizer=gt.SGD(1.0), reuse=True)
        before = table.pull([7])
    identify(str(folder), "graph")
    config = QUICK.model_copy(update={"shared_memory": shared_memory})
    with gt.connect(roles[1]["scheduler"], config=config) as connected:
        table = connected.table("read")
        with pytest.raises(AccessDenied):
            table.push([7], np.ones((1, 4), np.float32))
        assert np.array_equal(table.pull([7]), before)


def test_only_server_n_lives_and_leaves_as_shard_n(
    roles: tuple[GearCluster, Mapping[str, str]], folder: Path, tmp_path: Path
) -> None:
    issue(folder, tmp_path, ["server"], [1])
    identify(str(tmp_path), "server")
    assert Credentials.mine("127.0.0.1:1").first_shard == 1
    calls = GrpcCalls(SCHEDULER, "scheduler", roles[1]["scheduler"])
    assert calls.call(Heartbeat(shard=1, incarnation=1, wire=WIRE), 10.0).replaced
    for foreign in (Heartbeat(shard=0, incarnation=1), LeaveCluster(shard=0, incarnation=1)):
        with pytest.raises(AccessDenied, match=r"geartrain certs renew.*security\.folder"):
            calls.call(foreign, 10.0)
    calls.close()


def test_who_has_the_certificate_of_one_shard_serves_in_no_others_place(folder: Path, tmp_path: Path) -> None:
    def started(role: str, at: Path, *more: str) -> RoleProcess:
        return RoleProcess(role, "--listen=127.0.0.1:0", *more, **{FOLDER_VARIABLE: str(at)})

    for shard in (0, 1):
        issue(folder, tmp_path / str(shard), ["server"], [shard])
    identify(str(folder))
    with ExitStack() as stack:
        scheduler = stack.enter_context(started("scheduler", folder, "--num-shards=2"))
        to = f"--scheduler={scheduler.address}"
        second = stack.enter_context(started("server", tmp_path / "1", to)).address
        stack.enter_context(started("server", tmp_path / "0", to, f"--advertise={second}"))  # who took it over
        said = "its certificate is of another role, shard or cluster"
        config = QUICK.model_copy(update={"recovery_timeout_seconds": 0.0})
        with gt.connect(scheduler.address, config=config) as connected:
            with pytest.raises(ShardUnavailable, match=f"shard 0 .*{said}"):
                connected.create_table("rows", dim=4, optimizer=gt.SGD(1.0))  # as the scheduler tells
            with pytest.raises(ShardUnavailable, match=f"shard 0 .*{said}"):
                connected._calls.read([(0, Describe())])
            assert connected._calls.read([(1, Describe())])
        mine = Credentials.mine(second)
        for shard, codes in ((0, {grpc.StatusCode.UNAVAILABLE}), (1, {grpc.StatusCode.OK})):
            with mine.channel(second, channel.channel_options(1 << 20), "server", shard) as way:
                paths = [path for role, path, _ in RPCS if role == "server" and (shard == 0 or path.endswith("Ping"))]
                assert {outcome(way, path, path.endswith("Watch")) for path in paths} == codes
        for shared_memory in (True, False):
            wrong, right = (GrpcCarrier(second, shard, shared_memory=shared_memory) for shard in (0, 1))
            assert right.data_plane.connect()
            with pytest.raises(CertificateRejected, match=said):
                wrong.data_plane.connect()
            for carrier in (wrong, right):
                carrier.close()


def test_a_certificate_that_is_renewed_under_a_running_client_costs_it_no_step(folder: Path, tmp_path: Path) -> None:
    everyone = [CLIENT, *CERTIFIED_ROLES]
    issue(folder, tmp_path, everyone, days=15 * SECOND)
    identify(str(tmp_path))
    ended, ones = threading.Event(), np.ones((len(IDS), 4), np.float32)

    def renewals() -> None:
        while not ended.wait(2.0):
            renew(folder, tmp_path, all_of_them=True)

    def before_long(work: Callable[[], Any], refused: bool) -> None:
        """Wait until what is done again and again is refused, or is so no more."""
        deadline = time.monotonic() + 120
        while True:
            try:
                work()
                is_refused = False
            except AccessDenied:
                is_refused = True
            if is_refused is refused:
                return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    renewing = threading.Thread(target=renewals, daemon=True)
    renewing.start()  # before the cluster, which may take seconds
    by_tcp = QUICK.model_copy(update={"shared_memory": False})
    with (
        gear_cluster() as cluster,
        gt.connect(cluster.address, config=QUICK) as connected,
        gt.connect(cluster.address, config=by_tcp) as far,
    ):
        table = connected.create_table("rows", dim=4, optimizer=gt.SGD(1.0))
        other = far.table("rows")
        calls = GrpcCalls(SCHEDULER, "scheduler", cluster.address)
        deadline, steps = time.monotonic() + 120, 0
        try:
            before = other.pull(IDS)
            table.pull(IDS)
            planes = [way._calls._carriers[shard].data_plane for way in (connected, far) for shard in (0, 1)]
            opened = [plane.connection for plane in planes]
            while any(plane.connection is was for plane, was in zip(planes, opened, strict=True)):
                assert time.monotonic() < deadline
                table.push(IDS, ones)
                other.push(IDS, ones)
                assert calls.call(Ping(), 5.0).role == "scheduler"
                connected.create_table("rows", dim=4, optimizer=gt.SGD(1.0), reuse=True)
                steps += 1
                time.sleep(0.02)
        finally:
            ended.set()
            renewing.join()
            calls.close()
        assert np.allclose(table.pull(IDS), before - 2 * steps)
        # What is renewed no more is refused, by connections that there are, too: those under the last certificates.
        time.sleep(1.1)
        for way in (connected, far):
            way._calls.read([(shard, Describe()) for shard in (0, 1)])
        old = GrpcCalls(SCHEDULER, "scheduler", cluster.address)
        assert old.call(Ping(), 5.0)
        before_long(lambda: old.call(Ping(), 5.0), refused=True)
        old.close()
        for rows in (table, other):
            before_long(lambda rows=rows: rows.pull(IDS), refused=True)
        renew(folder, tmp_path, days=1, all_of_them=True)
        for rows in (table, other):
            before_long(lambda rows=rows: rows.pull(IDS), refused=False)
            assert np.allclose(rows.pull(IDS), before - 2 * steps)


def test_an_authority_is_replaced_without_a_stop(folder: Path, tmp_path: Path) -> None:
    """The new one is believed before anybody shows a certificate of it."""
    create_authority(tmp_path / "new", "test")
    issue(folder, tmp_path / "old", ["scheduler"])
    assert b"".join([(folder / CA_FILE).read_bytes()]) == (tmp_path / "old" / CA_FILE).read_bytes()
    issue(tmp_path / "new", tmp_path / "old", [CLIENT])
    assert (tmp_path / "old" / CA_FILE).read_text().count("BEGIN CERTIFICATE") == 2
    identify(str(tmp_path / "old"))
    assert [str(name) for name in Credentials.mine("127.0.0.1:1").names] == ["client/0"]


def test_a_certificate_that_runs_out_soon_is_warned_of_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issue(folder, tmp_path, [CLIENT], days=60 * SECOND)  # of which ten minutes have passed, for clocks that differ
    identify(str(tmp_path))
    assert Credentials.mine("127.0.0.1:1").names
    time.sleep(1.1)
    assert Credentials.mine("127.0.0.1:1").names
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'client.pem'} expires soon; renew it without a restart: 'geartrain certs renew'"
    ]


def damaged(path: Path) -> None:
    path.write_text("-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n")
    path.chmod(0o600)


def of_tomorrow(at: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "_CLOCKS_DIFFER", -timedelta(days=1))
        issue(at, at, [CLIENT])


def with_key_of(at: Path, other: str) -> None:
    begin = "-----BEGIN CERTIFICATE"
    key, own = (at / other).read_text().partition(begin)[0], (at / "client.pem").read_text().partition(begin)
    (at / "client.pem").write_text(key + begin + own[2])


def of_another_authority(at: Path) -> None:
    create_authority(at / "new", "shop")
    issue(at / "new", at / "new", [CLIENT]).replace(at / "client.pem")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda at: (at / CA_FILE).unlink(), "has no ca.pem; 'geartrain certs init"),
        (lambda at: (at / "client.pem").unlink(), "client.pem does not exist; 'geartrain certs issue .* client'"),
        (lambda at: (at / "client.pem").chmod(0o640), "chmod 600"),
        (lambda at: damaged(at / "client.pem"), "is damaged"),
        (lambda at: (at / "server.pem").rename(at / "client.pem"), r"of server/\*, not of a client"),
        (lambda at: issue(at, at, [CLIENT], days=-SECOND), "ran out at .*; 'geartrain certs renew"),
        (lambda at: of_tomorrow(at), "is good from .*; set the clock"),
        (lambda at: with_key_of(at, "graph.pem"), "has the key of another certificate"),
        (lambda at: of_another_authority(at), "is of an authority that is not in .*ca.pem"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named_with_its_remedy(spoil: Any, said: str, tmp_path: Path) -> None:
    done = typed("certs", "init", str(tmp_path), "--cluster=shop")
    assert done.returncode == 0, done.stderr
    identify(str(tmp_path))
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=said):
        Credentials.mine("127.0.0.1:1")


def test_of_files_that_are_copied_one_by_one_nothing_is_shown_before_they_fit(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_POLL_SECONDS", 0.0)
    own = issue(folder, tmp_path, [CLIENT])
    mine = Credentials(str(tmp_path), CLIENT)

    def shows() -> bytes:
        assert mine.names
        files = mine._current()
        assert files is not None
        return files.certificate

    before = shows()
    of_another_authority(tmp_path)
    assert shows() == before
    trusted = (tmp_path / CA_FILE).read_bytes()
    (tmp_path / CA_FILE).write_bytes(trusted + (tmp_path / "new" / CA_FILE).read_bytes())
    assert shows() == own.read_bytes() != before
    before = shows()
    # Copied by hand: others can read it, until that is mended.
    own.write_bytes(issue(folder, tmp_path / "next", [CLIENT]).read_bytes())
    own.chmod(0o644)
    assert shows() == shows() == before
    own.chmod(0o600)
    assert shows() == own.read_bytes() != before
    own.rename(tmp_path / "away")
    assert shows() == shows() == (tmp_path / "away").read_bytes()
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and all("keeping the present certificate" in line for line in told)


def test_an_authority_of_another_cluster_is_not_believed_beside_the_own_one(folder: Path, tmp_path: Path) -> None:
    create_authority(tmp_path / "new", "shop")
    issue(folder, tmp_path, [CLIENT])
    before = (tmp_path / "client.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"trusts cluster 'test', .* of cluster 'shop'.*--cluster test"):
        issue(tmp_path / "new", tmp_path, [CLIENT])
    assert (tmp_path / "client.pem").read_bytes() == before


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    create_authority(tmp_path, "test")
    (tmp_path / f".client.pem.{os.getpid()}").touch()  # in containers all have the same number
    assert issue(tmp_path, tmp_path, [CLIENT]).stat().st_mode & 0o777 == 0o600


def test_a_private_folder_that_cannot_be_made_leaves_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    identify(None)
    private_folder().parent.mkdir()
    private_folder().touch()
    with pytest.raises(ConfigError, match="cannot make certificates in"):
        create_private_folder()
    assert [path.name for path in private_folder().parent.iterdir()] == ["security"]
    private_folder().unlink()
    create_private_folder()
    assert [path.name for path in private_folder().parent.iterdir()] == ["security"]
    assert identity("127.0.0.1:7000")[0] and identity("10.0.0.1:7000")[0] is None
    assert private_folder().stat().st_mode & 0o777 == 0o700
    (private_folder() / "client.pem").unlink()
    with pytest.raises(ConfigError, match=r"remove .*security, and the next 'geartrain up' makes it anew"):
        Credentials.mine("127.0.0.1:1")


def test_the_commands_make_issue_and_renew(tmp_path: Path) -> None:
    assert typed("certs", "init", str(tmp_path)).returncode == 0
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        **{f"{role}.pem": 0o600 for role in CERTIFIED_ROLES},
        "ca.key": 0o600,
        CA_FILE: 0o644,
    }
    again = typed("certs", "init", str(tmp_path))
    assert again.returncode == 2 and "is there already" in again.stderr
    there = tmp_path / "host"
    host = typed("certs", "issue", str(there), "server", "--shards=2-3", f"--ca={tmp_path}", "--days=0.001")
    assert host.stdout == f"{there / 'server.pem'}\n"
    kept = typed("certs", "renew", str(there), f"--ca={tmp_path}").stdout
    assert "good until" in kept
    assert "renewed" in typed("certs", "renew", str(there), f"--ca={tmp_path}", "--all").stdout
    identify(str(there), "server")
    assert [str(name) for name in Credentials.mine("127.0.0.1:1").names] == ["server/2", "server/3"]
    for wrong, said in (
        (("issue", str(there), "client"), "no authority issues certificates here"),
        (("issue", str(tmp_path), "king"), "role is 'king'; it must be one of scheduler, server"),
        (("issue", str(tmp_path), "graph", "--shards=1"), "only a server has shards"),
        (("init", str(tmp_path / "x"), "--cluster=A B"), "cluster is 'A B'"),
    ):
        done = typed("certs", *wrong)
        assert done.returncode == 2 and said in done.stderr


def test_one_command_makes_what_one_machine_needs_and_renewal_keeps_it_so(tmp_path: Path) -> None:
    ca, host, worker = (str(tmp_path / name) for name in ("ca", "host", "worker"))
    assert typed("certs", "init", ca).returncode == 0
    done = typed("certs", "issue", host, "server,graph", "--shards=2-3", f"--ca={ca}")
    assert done.stdout.split() == [f"{host}/server.pem", f"{host}/graph.pem"]
    assert typed("certs", "issue", worker, "client", f"--ca={ca}").returncode == 0
    names = {folder: sorted(path.name for path in Path(folder).iterdir()) for folder in (host, worker)}
    assert names == {host: [CA_FILE, "graph.pem", "server.pem"], worker: [CA_FILE, "client.pem"]}
    ids = [create_token(Path(ca), "ads", ["*=read"], 1)[1] for _ in range(2)]
    for folder, token_id in zip((ca, host), ids, strict=True):
        assert typed("certs", "revoke", token_id, folder).returncode == 0
    create_authority(tmp_path / "next", "geartrain")
    issue(tmp_path / "next", tmp_path / "ca", [CLIENT])
    assert typed("certs", "renew", host, worker, f"--ca={ca}").returncode == 0
    assert {path.name for path in Path(host).iterdir()} == {*names[host], "token.pub", "revoked"}
    assert sorted(path.name for path in Path(worker).iterdir()) == names[worker]
    assert sorted((Path(host) / "revoked").read_text().split()) == sorted(ids)
    for folder in (host, worker):
        assert (Path(folder) / CA_FILE).read_bytes() == (tmp_path / "ca" / CA_FILE).read_bytes()
        assert b"PRIVATE KEY" not in b"".join(path.read_bytes() for path in Path(folder).glob("token*"))
    for wrong, said in (
        (("issue", host, "server,king", f"--ca={ca}"), "role is 'king'"),
        (("issue", host, "graph,client", "--shards=1", f"--ca={ca}"), "only a server has shards"),
        (("renew", str(tmp_path / "nowhere"), f"--ca={ca}"), "nowhere has no certificates"),
    ):
        done = typed("certs", *wrong)
        assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_health_says_which_certificate_is_wrong(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_authority(tmp_path, "test")
    issue(tmp_path, tmp_path, [CLIENT])
    own = tmp_path / "own"
    issue(folder, own, ["scheduler"])
    with RoleProcess("scheduler", "--listen=127.0.0.1:0", f"--security-folder={own}") as role:
        for shown, said in (
            (
                str(tmp_path),
                f"that security.folder does not believe; this process shows {tmp_path}/client.pem; give both",
            ),
            (NO_FOLDER, "it may want a certificate.*shows none: it has no security.folder; give both"),
        ):
            monkeypatch.setenv(FOLDER_VARIABLE, shown)
            identify(None)
            told = typed("health", role.address)
            assert told.returncode == 1 and re.search(said, told.stderr), told.stderr
        monkeypatch.setenv(FOLDER_VARIABLE, str(own))
        identify(None)  # a probe beside the role has its certificate alone
        assert typed("health", role.address).returncode == 0
        told = typed("health", role.address, "--service=shards", "--json")
        assert told.returncode == 1 and "'shards' is not so yet" in json.loads(told.stdout)["reason"]


def test_a_role_that_others_reach_starts_under_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    typed("certs", "init", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    file.write_text(f"security:\n  folder: {tmp_path}\nscheduler:\n  listen: 0.0.0.0:7000\n")
    assert typed("config", "validate", str(file)).returncode == 0
    identify(None)
    file.write_text("scheduler:\n  listen: 0.0.0.0:7000\n")
    refused = typed("config", "validate", str(file))
    assert refused.returncode == 2 and "security.folder" in refused.stderr


def test_health_is_asked_with_the_certificate_of_a_role_where_there_is_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(folder, tmp_path, ["scheduler"])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    identify(None)
    with RoleProcess("scheduler", "--listen=127.0.0.1:0") as role:
        assert typed("health", role.address).returncode == 0
        status = json.loads(typed("status", f"--scheduler={role.address}", "--json").stdout)
        assert [shard["state"] for shard in status["shards"]] == ["missing"]


def test_on_one_machine_nobody_types_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles on loopback make a certificate of their user, which clients on loopback look for."""
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    identify(None)
    up = ("up", "--json", "--shards=1", "--scheduler-listen=127.0.0.1:0")
    with RoleProcess(*up) as cluster, gt.connect(cluster.facts["scheduler"], config=QUICK) as connected:
        address = cluster.facts["scheduler"]
        assert connected.create_table("rows", dim=4, optimizer=gt.SGD(1.0)).pull([7]).shape == (1, 4)
        (own,) = tmp_path.glob("*/security")
        assert own.stat().st_mode & 0o777 == 0o700 and (own / "client.pem").stat().st_mode & 0o777 == 0o600
        assert json.loads(typed("status", f"--scheduler={address}", "--json").stdout)["insecure"] is False
        assert typed("health", address).returncode == 0
        with opened(address, "scheduler", None) as plain:
            assert outcome(plain, "/grpc.health.v1.Health/Check", False) is grpc.StatusCode.UNAVAILABLE
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
        assert typed("health", address).returncode == 1
        cluster.process.terminate()
        assert cluster.process.wait(20) == 0
    with RoleProcess("scheduler", "--listen=127.0.0.1:0", "--insecure") as open_role:
        told = json.loads(typed("status", f"--scheduler={open_role.address}", "--json").stdout)
        assert told["insecure"] is True
    assert not (tmp_path / "another user").exists()


def test_silent_strangers_by_the_thousand_keep_nobody_out(folder: Path) -> None:
    """More than a process may have open by default."""
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, given)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, given[1]))
        role = stack.enter_context(RoleProcess("scheduler", "--listen=127.0.0.1:0", f"--security-folder={folder}"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (given[1], given[1]))
        identify(str(folder))
        for _ in range(1500):
            stack.enter_context(socket.create_connection(split_address(role.address), timeout=10))
        assert is_serving(role.address, 5.0)
