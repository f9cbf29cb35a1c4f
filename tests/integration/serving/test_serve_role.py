"""``geartrain serve`` as a process, and as several: commands, certificates and tokens, workers that die, the end."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import geartrain as gt
from geartrain.ams.values.config import FOLDER_VARIABLE, TOKEN_VARIABLE, ClusterConfig, SecurityConfig, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.certificates import create_authority, issue
from geartrain.launch.serving.role import ServeRole
from geartrain.launch.tokens import create_token
from tests.support.command_line import typed
from tests.support.http_service import ask
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, picture

PICTURE = picture(1)
ANY_PORT = "--listen=127.0.0.1:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model."""
    folder = tmp_path_factory.mktemp("models")
    for version in (90, 120):
        exported(folder / f"{version:06d}", version=version)
    return folder


def metrics_of(address: str) -> str:
    with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def version_of(address: str) -> int:
    status, said = ask(address, "POST", "/v1/classify?k=1", PICTURE)
    assert (status, said["model"], len(said["answers"][0])) == (200, "glyphs", 1)
    return int(said["version"])


def test_it_answers_rolls_back_and_ends_by_its_commands(folder: Path, tmp_path: Path) -> None:
    with RoleProcess("serve", f"glyphs={folder}", ANY_PORT) as serving:
        address = serving.address
        assert serving.facts["ready"] == "serve"
        assert serving.facts["url"] == f"http://{address}"
        assert serving.facts["models"] == ["glyphs"]
        assert version_of(address) == 120
        assert typed("rollback", address).stdout == f"{address}: version 90 of glyphs is current\n"
        assert version_of(address) == 90
        assert json.loads(typed("rollback", address, "glyphs", "--to=120", "--json").stdout)["current"] == 120
        missing = typed("rollback", address, "--to", "7")
        assert missing.returncode == 1
        assert "there is no version 7 of 'glyphs'; there is 90, 120" in missing.stderr
        assert typed("health", address).stdout == f"{address}: serving\n"
        taken = typed("serve", str(folder), "--listen", address)
        assert taken.returncode == 2
        assert f"{address} is in use by process {serving.process.pid}" in taken.stderr
        serving.process.terminate()
        assert serving.process.wait(20) == 0
    assert "no service of models answers" in typed("rollback", address).stderr
    for models, sentence in {
        (): "there is nothing to serve: give the folder of a model",
        (str(tmp_path),): f"{tmp_path} holds no model",
        (f"a/b={folder}",): "a name has letters, digits and ._- alone",
        (f"a={folder}", f"a={folder}"): "models names 'a' twice",
    }.items():
        refused = typed("serve", ANY_PORT, *models)
        assert refused.returncode == 2
        assert sentence in refused.stderr


def test_a_role_of_this_process_serves_several_models_and_a_canary(folder: Path) -> None:
    models = [f"one={folder / '000120'}", f"two={folder}"]
    with gt.ops.Role("serve", listen="127.0.0.1:0", models=models, canary=str(folder / "000090"), share=1) as role:
        assert role.facts["models"] == ["one", "two"]
        asked = [ask(role.address, "POST", f"/v1/models/{name}/classify", PICTURE)[1] for name in ("one", "two")]
        assert [said["version"] for said in asked] == [90, 120]
        status, said = ask(role.address, "POST", "/v1/classify", PICTURE)
        assert (status, said["error"]["message"]) == (404, "name a model: one, two")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[RoleProcess]:
    with RoleProcess("serve", f"glyphs={folder}", ANY_PORT, "--workers=2") as serving:
        yield serving


def test_a_change_reaches_every_worker_also_one_that_is_started_anew(workers: RoleProcess) -> None:
    parent = psutil.Process(workers.process.pid)
    assert len(before := parent.children()) == 2
    assert typed("rollback", workers.address).returncode == 0
    assert {version_of(workers.address) for _ in range(20)} == {90}
    for place in (0, 1):  # each of them once: the first took its versions from the second, and now gives them on
        before = sorted(parent.children(), key=lambda child: child.create_time())
        before[place].kill()
        before[place].wait(20)
        assert {version_of(workers.address) for _ in range(20)} == {90}
        while len(parent.children()) < 2 or before[place] in parent.children():
            pass
        assert json.loads(typed("rollback", workers.address, "--to=90", "--json").stdout)["current"] == 90
    said = [ask(workers.address, "GET", "/v1/models/glyphs")[1] for _ in range(20)]
    assert {(entry["current"], entry["held"]) for entry in said} == {(90, True)}


def test_a_worker_that_cannot_load_what_others_serve_answers_nothing_else_and_comes_back(
    folder: Path, tmp_path: Path
) -> None:
    versions = shutil.copytree(folder, tmp_path / "versions")
    with RoleProcess("serve", f"glyphs={versions}", ANY_PORT, "--workers=2", errors=tmp_path / "log") as serving:
        parent = psutil.Process(serving.process.pid)
        assert typed("rollback", serving.address, "--to=90").returncode == 0
        shutil.rmtree(versions / "000090")
        parent.children()[0].kill()
        while "cannot serve what the others did" not in (tmp_path / "log").read_text():
            with contextlib.suppress(ConnectionError):  # it was connected to the one that died
                assert version_of(serving.address) == 90
        assert {version_of(serving.address) for _ in range(20)} == {90}
        assert typed("rollback", serving.address, "--to=120").returncode == 0
        counting: set[str] = set()
        while counting != {"0", "1"}:
            assert version_of(serving.address) == 120
            counting = set(re.findall(r'serve_queue_items\{[^}]*worker="(\d)"', metrics_of(serving.address)))


def test_connections_are_spread_over_workers(workers: RoleProcess) -> None:
    children = psutil.Process(workers.process.pid).children()

    def accepted() -> list[int]:
        return [sum(one.status == "ESTABLISHED" for one in child.net_connections("tcp")) for child in children]

    where = split_address(workers.address)
    with contextlib.ExitStack() as opened:
        for _ in range(128):
            opened.enter_context(socket.create_connection(where, timeout=20))
        while sum(accepted()) < 128:
            pass
        assert min(accepted()) > 32  # 64 but for chance, which makes it so few once in 10^8


@pytest.mark.parametrize(("name", "value", "needed"), [("share", 0.2, "canary"), ("keep", 5, "follow")])
def test_what_nothing_would_read_is_refused(name: str, value: float, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value} without {needed}; give --{needed}"):
        ServeRole(ClusterConfig(serve={"models": ["there"], name: value}))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else name)
    with pytest.raises(ConfigError, match=r"a service needs starlette, .* pip install 'geartrain\[serve\]'"):
        ServeRole(ClusterConfig(serve={"models": ["there"]}))


def test_a_killed_worker_fails_no_request_of_another(workers: RoleProcess) -> None:
    ending, answered, broken = threading.Event(), [0] * 6, [0] * 6

    def ask_on(number: int) -> None:
        connection = http.client.HTTPConnection(workers.address, timeout=20)
        while not ending.is_set():
            try:
                connection.request("POST", "/v1/classify?k=1", PICTURE)
                assert connection.getresponse().read().startswith(b'{"model":"glyphs"')
                answered[number] += 1
            except (ConnectionError, http.client.HTTPException):  # it was connected to the one that died, or just then
                connection.close()
                broken[number] += 1

    parent = psutil.Process(workers.process.pid)
    with ThreadPoolExecutor(6) as clients:
        asking = [clients.submit(ask_on, number) for number in range(6)]
        try:
            while min(answered) < 5 and not any(client.done() for client in asking):
                pass
            killed = parent.children()[0]
            killed.kill()
            while killed in (children := parent.children()) or len(children) < 2:
                pass
            assert typed("rollback", workers.address, "--to=90").returncode == 0  # of the new one, too
        finally:
            ending.set()
        for client in asking:
            client.result(20)
    assert max(broken) <= 2


@pytest.mark.parametrize("number", [1, 2])
def test_what_was_accepted_is_answered_after_sigterm(folder: Path, number: int) -> None:
    with RoleProcess("serve", f"glyphs={folder}", ANY_PORT, f"--workers={number}") as serving:
        where = split_address(serving.address)
        head = f"Host: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(PICTURE)}\r\nExpect: 100-continue"
        with socket.create_connection(where, timeout=20) as accepted:
            accepted.sendall(f"POST /v1/classify HTTP/1.1\r\n{head}\r\n\r\n".encode())
            assert accepted.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            serving.process.terminate()
            while True:
                try:
                    socket.create_connection(where, timeout=20).close()
                except ConnectionError:
                    break
            time.sleep(3.5)  # longer than other roles are given
            accepted.sendall(PICTURE)
            response = http.client.HTTPResponse(accepted)
            response.begin()
            assert (response.status, json.loads(response.read())["model"]) == (200, "glyphs")
        assert serving.process.wait(10) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_however_it_ends(folder: Path, how: signal.Signals) -> None:
    with RoleProcess("serve", str(folder), ANY_PORT, "--workers=2") as serving:
        children = psutil.Process(serving.process.pid).children()
        serving.process.send_signal(how)
        assert serving.process.wait(20) == (0 if how == signal.SIGTERM else -how)
        gone, alive = psutil.wait_procs(children, 20)
        assert (len(gone), alive) == (2, [])


def test_a_worker_that_cannot_serve_is_said_by_the_command(tmp_path: Path) -> None:
    refused = typed("serve", str(tmp_path), ANY_PORT, "--workers=2")
    assert refused.returncode == 2
    assert f"{tmp_path} holds no model" in refused.stderr


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    folder = tmp_path / "certificates"
    create_authority(folder, "test")
    for role in ("serve", "client"):
        issue(folder, folder, [role])
    return folder


def context(certificates: Path, *, shows: bool) -> ssl.SSLContext:
    found = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    found.check_hostname = False  # the address is in no certificate
    if shows:
        found.load_cert_chain(certificates / "client.pem")
    return found


def test_under_certificates_a_client_shows_one_and_a_command_does(folder: Path, certificates: Path) -> None:
    config = ClusterConfig(security=SecurityConfig(folder=str(certificates)))
    with gt.ops.Role("serve", config, listen="127.0.0.1:0", models=[f"glyphs={folder}"]) as role:
        assert role.facts["url"].startswith("https://")
        known = context(certificates, shows=True)
        assert ask(role.address, "POST", "/v1/classify", PICTURE, known)[1]["version"] == 120
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            ask(role.address, "GET", "/livez", None, context(certificates, shows=False))
        done = typed("rollback", role.address, "--security-folder", str(certificates))
        assert done.stdout == f"{role.address}: version 90 of glyphs is current\n", done.stderr


def test_tokens_say_who_may_ask_and_who_may_change(
    folder: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(name: str, allow: str, days: float = 1.0) -> dict[str, str]:
        create_token(certificates, name, [allow], days)
        return {"Authorization": f"Bearer {(certificates / f'{name}.token').read_text().strip()}"}

    reader, boss, other = token("reader", "glyphs=read"), token("boss", "*=read,admin"), token("other", "faces=read")
    late = token("late", "*=read", 1e-9)
    config, page = ClusterConfig(security=SecurityConfig(folder=str(certificates))), "https://page.example"
    with gt.ops.Role("serve", config, listen="127.0.0.1:0", models=[f"glyphs={folder}"], origins=[page]) as role:
        tls = context(certificates, shows=False)
        rollback = "/v1/models/glyphs/rollback"
        for status, path, body, headers, sentence in (
            (200, "/v1/classify", PICTURE, reader, ""),
            (401, "/v1/classify", PICTURE, {}, "it shows no token; send a token that 'geartrain certs token' made"),
            (401, "/v1/classify", PICTURE, late, "its token ran out"),
            (401, "/v1/classify", PICTURE, {"Authorization": "Bearer gt1.x.y"}, "no token of this cluster"),
            (403, "/v1/classify", PICTURE, other, "its token gives no right to read 'glyphs'"),
            (403, "/v1/classify?version=7", PICTURE, other, "its token gives no right to read 'glyphs'"),
            (404, "/v1/classify?version=7", PICTURE, reader, "version 7 of 'glyphs' is not served"),
            (403, rollback, b"{}", reader, "no right to admin 'glyphs'; 'geartrain certs token NAME FOLDER --allow"),
            (200, rollback, b"{}", boss, ""),
        ):
            found, said = ask(role.address, "POST", path, body, tls, **headers)
            assert found == status
            assert sentence in said.get("error", {}).get("message", "")
        assert ask(role.address, "GET", "/readyz", None, tls)[0] == 200
        assert ask(role.address, "GET", "/v1/models", None, tls)[0] == 401
        asks_first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for status, origin, method, headers in (
            (200, page, "OPTIONS", asks_first),  # without a token, as browsers do
            (401, page, "POST", {}),
            (400, "https://evil.example", "OPTIONS", asks_first),
        ):
            connection = http.client.HTTPSConnection(role.address, timeout=20, context=tls)
            with closing(connection):
                connection.request(method, "/v1/classify", headers={"Origin": origin, **headers})
                response = connection.getresponse()
                allowed = response.headers.get("Access-Control-Allow-Origin")
            assert (response.status, allowed) == (status, page if origin == page else None)
        monkeypatch.setenv(TOKEN_VARIABLE, str(certificates / "boss.token"))
        done = typed("rollback", role.address, "--to=120", "--security-folder", str(certificates))
        assert "version 120 of glyphs is current" in done.stdout, done.stderr


def test_a_certificate_that_is_renewed_is_shown_to_who_comes_next(folder: Path, certificates: Path) -> None:
    config = ClusterConfig(security=SecurityConfig(folder=str(certificates)))
    known = context(certificates, shows=True)

    def shown(address: str) -> bytes:
        connection = http.client.HTTPSConnection(address, timeout=20, context=known)
        connection.connect()
        try:
            certificate: bytes = connection.sock.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            return certificate
        finally:
            connection.close()

    with gt.ops.Role("serve", config, listen="127.0.0.1:0", models=[str(folder)]) as role:
        before = shown(role.address)
        issue(certificates, certificates, ["serve"])
        while shown(role.address) == before:
            pass


def test_other_machines_are_answered_under_certificates_or_by_wish_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    refused = typed("serve", str(folder), "--listen=0.0.0.0:0")
    assert refused.returncode == 2
    assert "listen '0.0.0.0:0' can be reached from other machines" in refused.stderr
    with gt.ops.Role("serve", listen="0.0.0.0:0", insecure=True, models=[f"glyphs={folder}"]) as role:
        _, port = split_address(role.address)
        assert ask(f"127.0.0.1:{port}", "GET", "/readyz", Host="models.example")[0] == 200
    assert os.environ.get(FOLDER_VARIABLE) is None
