"""The port that tells what a process counts: real sockets, read by Prometheus' own parser."""

from __future__ import annotations

import gc
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")

from geartrain.ams.observe.metrics import Buckets, Metric, register_source, serve_metrics
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.certificates import create_authority, issue, renew
from tests.support.scrapes import scrape

METRICS = [
    Metric("calls_total", "counter", "Calls.", ("shard", "op"), [((0, "pull"), 3)]),
    Metric("rows", "gauge", 'Of "tables".', samples=[((), 2.5)]),
    Metric("calls_total", "counter", "Calls.", ("shard", "op"), [((1, 'pu"sh\n'), 4)]),
    Metric("call_seconds", "histogram", "How long.", ("op",), [(("pull",), Buckets((0.5, 2), (1, 0, 2), 7.0))]),
]
OPEN = Credentials(None, "server")


def test_every_sample_names_the_cluster_and_families_are_put_together() -> None:
    with serve_metrics("127.0.0.1:0", lambda: METRICS, "server", OPEN) as port:
        found = scrape(port.address)
    assert found.kinds["geartrain_calls_total"] == "counter"
    assert found.value("geartrain_calls_total", cluster="local", shard=0, op="pull") == 3
    assert found.value("geartrain_calls_total", cluster="local", shard=1, op='pu"sh\n') == 4
    assert found.value("geartrain_rows") == 2.5
    assert found.values("geartrain_call_seconds_bucket", op="pull") == [1, 1, 3]
    assert found.value("geartrain_call_seconds_bucket", le="2.0") == 1
    assert found.value("geartrain_call_seconds_sum") == 7
    assert found.value("geartrain_build_info", cluster="local", role="server") == 1
    assert found.value("process_resident_memory_bytes", cluster="local") > 1e6


def test_counters_are_read_at_each_scrape_and_a_failure_ends_that_scrape_alone() -> None:
    counted: Iterator[float] = iter([1.0, 2.0])

    def collect() -> list[Metric]:
        return [Metric("steps", "gauge", "Steps.", samples=[((), next(counted))])]

    with serve_metrics("127.0.0.1:0", collect, "scheduler", OPEN) as port:
        assert [scrape(port.address).value("geartrain_steps") for _ in range(2)] == [1, 2]
        with pytest.raises((http.client.HTTPException, OSError)):
            scrape(port.address)
        counted = iter([3.0])
        assert scrape(port.address).value("geartrain_steps") == 3


def test_sources_of_a_process_are_told_together_as_long_as_they_are_used() -> None:
    class Cache:
        def metrics(self) -> list[Metric]:
            age = Metric("age_seconds", "histogram", "Age.", ("cache",), [(("c",), Buckets((1,), (2, 3)))])
            return [Metric("hits_total", "counter", "Hits.", ("cache",), [(("c",), 5)]), age]

    one, other = Cache(), Cache()
    with serve_metrics("127.0.0.1:0", list, "server", OPEN) as port:
        register_source(one)
        register_source(other)
        found = scrape(port.address)
        assert found.value("geartrain_hits_total", cache="c") == 10
        assert found.values("geartrain_age_seconds_bucket", cache="c") == [4, 10]
        del other
        gc.collect()
        assert scrape(port.address).value("geartrain_hits_total", cache="c") == 5


def test_some_who_connect_and_say_nothing_keep_no_scrape_out() -> None:
    with serve_metrics("127.0.0.1:0", lambda: METRICS, "server", OPEN) as port, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(split_address(port.address)))
        assert scrape(port.address).value("geartrain_rows") == 2.5


def test_an_address_that_is_taken_is_refused_in_words() -> None:
    with (
        serve_metrics("127.0.0.1:0", list, "server", OPEN) as port,
        pytest.raises(ConfigError, match=r"cannot serve metrics at .* in use"),
    ):
        serve_metrics(port.address, list, "server", OPEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority(tmp_path, "search")
    issue(tmp_path, tmp_path, ["server"], days=2)
    issue(tmp_path, tmp_path, ["client"], days=2)
    return tmp_path


def caller(folder: Path, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if certificate:
        context.load_cert_chain(folder / "client.pem")
    return context


def test_only_the_cluster_may_ask_where_there_are_certificates(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    create_authority(other, "search")
    issue(other, other, ["client"], days=2)
    stranger = caller(folder, certificate=False)
    stranger.load_cert_chain(other / "client.pem")
    mine = Credentials(str(folder), "server")
    with serve_metrics("127.0.0.1:0", lambda: METRICS, "server", mine) as port:
        found = scrape(port.address, caller(folder), "search.geartrain")
        assert found.value("geartrain_rows", cluster="search") == 2.5
        refused: list[Callable[[], object]] = [
            lambda: scrape(port.address),
            lambda: scrape(port.address, caller(folder, certificate=False), "search.geartrain"),
            lambda: scrape(port.address, stranger, "search.geartrain"),
        ]
        for ask in refused:
            with pytest.raises((http.client.HTTPException, OSError)):
                ask()
        # One authority may issue for several clusters.
        monkeypatch.setattr(Credentials, "cluster", "another")
        with pytest.raises((http.client.HTTPException, OSError)):
            scrape(port.address, caller(folder), "search.geartrain")


def test_a_client_serves_counters_under_its_own_name_and_no_other(folder: Path) -> None:
    with serve_metrics("127.0.0.1:0", lambda: METRICS, "worker", Credentials(str(folder), "client")) as port:
        found = scrape(port.address, caller(folder), "client.search.geartrain")
        assert found.value("geartrain_build_info", role="worker", cluster="search") == 1
        for name in ("search.geartrain", "server.search.geartrain"):
            with pytest.raises(ssl.SSLCertVerificationError):
                scrape(port.address, caller(folder), name)


def test_renewed_certificates_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.ams.rpc.credentials._POLL_SECONDS", 0.0)

    def shown(address: str) -> bytes | None:
        host, _, number = address.rpartition(":")
        with (
            socket.create_connection((host, int(number)), timeout=20) as sock,
            caller(folder).wrap_socket(sock, server_hostname="search.geartrain") as secure,
        ):
            return secure.getpeercert(binary_form=True)

    with serve_metrics("127.0.0.1:0", lambda: METRICS, "server", Credentials(str(folder), "server")) as port:
        first = shown(port.address)
        assert shown(port.address) == first
        renew(folder, folder, all_of_them=True)
        assert shown(port.address) != first
        assert scrape(port.address, caller(folder), "search.geartrain").value("geartrain_rows") == 2.5
