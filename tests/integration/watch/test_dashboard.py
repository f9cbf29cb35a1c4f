"""The page that shows a cluster, as a browser asks for it: whom it tells, and what."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import shutil
import ssl
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.values.config import CLIENT, ClientConfig, ClusterConfig, ServerConfig, identify
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.cli.cluster.status import report_of_cluster
from geartrain.launch.certificates import create_authority, issue
from geartrain.watch.page import Dashboard
from tests.integration.conftest import ServedCluster
from tests.support.command_line import typed
from tests.support.role_process import RoleProcess

NOWHERE = ClusterConfig(server=ServerConfig(scheduler="127.0.0.1:1"))


class Browser:
    """Keeps the cookie of one dashboard."""

    def __init__(self, page: Dashboard, context: ssl.SSLContext | None = None) -> None:
        self.address = page.address
        self.context = context
        self.cookie = ""
        self.opened = self.get(f"/?{page.url.partition('?')[2]}")
        self.cookie = self.opened.headers.get("Set-Cookie", "").partition(";")[0]

    def connection(self) -> http.client.HTTPConnection:
        if self.context is None:
            return http.client.HTTPConnection(self.address, timeout=20)
        return http.client.HTTPSConnection(self.address, timeout=20, context=self.context)

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> http.client.HTTPResponse:
        return self.ask("POST", path, json.dumps(body), headers)

    def ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = self.connection()
        connection.request(method, path, body, {**({"Cookie": self.cookie} if self.cookie else {}), **headers})
        return connection.getresponse()

    @contextmanager
    def messages(self) -> Iterator[Iterator[dict[str, Any]]]:
        """What a page hears, each as it comes."""
        with closing(self.get("/events")) as stream:
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            yield (json.loads(line[6:]) for line in stream if line.startswith(b"data: "))


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links lie."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def shown(served: Any) -> Iterator[tuple[ServedCluster, Dashboard]]:
    cluster = served(2)
    page = Dashboard(ClusterConfig(server=ServerConfig(scheduler=cluster.address)), "127.0.0.1:0")
    yield cluster, page
    page.stop(5)


def test_a_page_hears_how_the_cluster_is_and_what_happens(
    shown: tuple[ServedCluster, Dashboard], tmp_path: Path
) -> None:
    cluster, page = shown
    browser = Browser(page)
    with browser.messages() as messages, connect(cluster.address, config=ClientConfig()) as client:
        first = next(message for message in messages if not message["error"])
        assert [shard["state"] for shard in first["shards"]] == ["up", "up"]
        assert first["health"] == "ready"
        assert sum(shard["num_buckets"] for shard in first["shards"]) == 4096
        table = client.create_table("t", dim=4, optimizer=SGD(0.1))
        table.assign(np.arange(100), np.zeros((100, 4), np.float32))
        path = str(client.snapshot(str(tmp_path), step=7).result())
        heard: list[dict[str, Any]] = []
        for message in messages:
            heard += message["events"]
            if message["snapshots"] and message["rows"] == 100:
                break
        assert [event["kind"] for event in heard] == ["schema", "snapshot"]
        assert message["tables"][0]["rows"] == 100
        assert message["curves"]["rows t"][-1][2] == 100
        rates = (message["per_second"]["calls"] for message in messages if table.pull(np.arange(5)).size)
        assert next(rate for rate in rates if rate > 0) < 1000
        assert [(found["path"], found["step"]) for found in message["snapshots"]] == [(path, 7)]

        later = str(client.snapshot(str(tmp_path), step=8).result())
        shown_paths = ([found["path"] for found in message["snapshots"]] for message in messages)
        assert next(paths for paths in shown_paths if len(paths) == 2) == [later, path]
        shutil.rmtree(later)
        assert next(paths for paths in shown_paths if len(paths) < 2) == [path]

        here = {"Origin": f"http://{browser.address}"}
        assert browser.post("/verify", {"snapshot": str(tmp_path)}, **here).status == 409  # nobody told of it
        damaged = max(Path(path).iterdir(), key=os.path.getsize)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        assert browser.post("/verify", {"snapshot": path}, **here).status == 202
        checked = (message["snapshots"][0]["verified"] for message in messages)
        found = next(text for text in checked if text and not text.startswith("reading"))
        assert damaged.name in found

        cluster.servers[1].stop(0)
        assert next(m for m in messages if m["shards"][1]["state"] != "up")["shards"][0]["state"] == "up"
        cluster.servers[1] = cluster.start_server(1)
        again = next(m for m in messages if m["shards"][1]["state"] == "up")
        assert again["error"] == ""
        assert (again["health"], again["incomplete_tables"]) == ("degraded", ["t"])
        told = report_of_cluster(ClusterConfig(server=ServerConfig(scheduler=cluster.address)))  # of geartrain status
        assert (told.facts["health"], told.ready) == ("degraded", False)
        assert [(of["name"], of["state"], of["dim"]) for of in again["tables"]] == [("t", "lost rows", 4)]
        cluster.scheduler.stop(0)
        assert "asked again" in next(m["error"] for m in messages if m["error"])


def test_a_gear_that_hangs_delays_no_look(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr("geartrain.watch.dashboard_state._gears_and_graphs", lambda _: {"gears": [str(answers.wait())]})
    page = Dashboard(ClusterConfig(server=ServerConfig(scheduler=served(1).address)), "127.0.0.1:0")
    try:
        with Browser(page).messages() as messages:
            looks = (message for message in messages if not message["error"])
            assert "gears" not in next(looks)
            answers.set()
            assert any("gears" in look for look in looks)
    finally:
        answers.set()
        page.stop(5)


@pytest.fixture
def lonely() -> Iterator[Dashboard]:
    page = Dashboard(NOWHERE, "127.0.0.1:0")
    yield page
    page.stop(5)


def test_the_link_is_good_once_and_without_it_nobody_is_told(lonely: Dashboard) -> None:
    stranger_before = lonely.url
    browser = Browser(lonely)
    assert browser.opened.status == 200
    cookie = browser.opened.headers["Set-Cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    policy = browser.opened.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert browser.get("/").status == 200
    browser.cookie = ""
    for path in ("/", f"/?{stranger_before.partition('?')[2]}", "/?key=", "/events", "/events?key=x", "/nothing"):
        refused = browser.get(path)
        assert (refused.status, refused.headers["Set-Cookie"]) == (403, None), path
    for path, why in (
        ("/", "opens by a link"),
        (f"/?{stranger_before.partition('?')[2]}", "was used"),
        ("/?key=x", "is not of this dashboard"),
    ):
        refused = browser.get(path)
        page = refused.read().decode()
        assert why in page, path
    said = re.search("<code>geartrain (.*)</code>", page)
    assert said is not None
    done = typed(*said[1].split())
    assert done.stdout.strip() == lonely.url
    assert Browser(lonely).opened.status == 200  # by the next link
    (kept,) = Path(os.environ["XDG_STATE_HOME"]).rglob("dashboard-*")
    assert (kept.stat().st_mode & 0o777, kept.read_text()) == (0o600, lonely.url)
    left = kept.read_bytes()
    lonely.stop(5)
    assert typed(*said[1].split()).returncode == 2
    kept.write_bytes(left)  # as one that was killed leaves it
    assert typed(*said[1].split()).returncode == 2


def test_a_dashboard_without_a_folder_for_its_link_ends_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    page = Dashboard(NOWHERE, "127.0.0.1:0")
    assert Browser(page).opened.status == 200
    page.stop(5)
    with pytest.raises(OSError, match="refused"):
        Browser(page)


def test_names_and_pages_of_others_are_refused(lonely: Dashboard) -> None:
    browser = Browser(lonely)
    port = browser.address.rpartition(":")[2]
    for host, status in {
        "evil.example": 421, f"evil.example:{port}": 421, "": 421, "127.0.0.1.evil.example": 421,
        f"localhost:{port}": 200, "127.0.0.1:9999": 200, "[::1]": 200,
    }.items():  # fmt: skip
        assert browser.get("/", Host=host).status == status, host
    for origin in ({}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Origin": f"https://{browser.address}"}):
        assert browser.post("/verify", {"snapshot": "x"}, **origin).status == 403
    here = {"Origin": f"http://{browser.address}"}
    for body, status in ((["snapshot"], 400), ({"snapshot": ["x"]}, 409), ({"snapshot": "x" * 100_000}, 400)):
        assert browser.post("/verify", body, **here).status == status
    assert browser.get("/verify").status == 405


def test_other_machines_are_shown_it_under_tls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ssh -L"):
        Dashboard(NOWHERE, "0.0.0.0:0")
    create_authority(tmp_path, "test")
    issue(tmp_path, tmp_path, [CLIENT])
    monkeypatch.setattr("geartrain.ams.values.config._identity", None)
    identify(str(tmp_path))
    page = Dashboard(NOWHERE, "0.0.0.0:0")
    try:
        assert page.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        context.check_hostname = False
        browser = Browser(page, context)
        assert browser.opened.status == 200
        assert "secure" in browser.opened.headers["Set-Cookie"].lower()
        at = ("127.0.0.1", int(page.address.rsplit(":", 1)[1]))
        first = ssl.get_server_certificate(at)
        issue(tmp_path, tmp_path, [CLIENT])  # as 'geartrain certs renew' does
        while ssl.get_server_certificate(at) == first:
            assert browser.get("/").status == 200
    finally:
        page.stop(5)


def test_up_starts_one_that_died_again_where_it_was() -> None:
    listen = ("--scheduler-listen=127.0.0.1:0", "--dashboard-listen=127.0.0.1:0")
    with RoleProcess("up", "--json", *listen) as up:
        assert up.facts["dashboard"].startswith("http://127.0.0.1:")
        os.kill(up.facts["pids"]["dashboard"], 9)
        assert up.process.stderr is not None
        (link,) = itertools.islice((line for line in up.process.stderr if "dashboard | open" in line), 1)
        url = link.split("open ")[1].partition(": the")[0]
        assert url.partition("/?")[0] == up.facts["dashboard"].partition("/?")[0]
        assert urllib.request.urlopen(url, timeout=20).status == 200
        assert typed("health", up.facts["scheduler"], "--service=shards").returncode == 0


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for module in ("geartrain.watch.page", "geartrain.serving.http.server"):
        monkeypatch.delitem(sys.modules, module)
    done = typed("dashboard", "--listen=127.0.0.1:0")
    assert done.returncode == 2
    assert "pip install 'geartrain[dashboard]'" in done.stderr
