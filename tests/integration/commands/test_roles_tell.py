"""What real roles tell Prometheus, and that ``docs/explanation/metrics.md`` lists all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")

import geartrain as gt
from geartrain.ams.values.config import ClientConfig
from geartrain.launch.ports import role_at
from tests.support.role_process import RoleProcess
from tests.support.scrapes import Scrape, scrape

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs/explanation/metrics.md").read_text()
AT = "--metrics=127.0.0.1:0"
GEAR = ["--name=image", "--module=train_with_slow_gears:build", "--samples=train_with_slow_gears:samples", "--dim=16"]


class Roles(NamedTuple):
    """A cluster of one shard that has worked, with a graph service and a slow gear."""

    scheduler: RoleProcess
    server: RoleProcess
    graph: RoleProcess
    slowgear: RoleProcess
    told: Scrape
    """By the server, before there was a slow gear."""


@pytest.fixture(scope="module")
def roles() -> Iterator[Roles]:
    with ExitStack() as stack:

        def start(role: str, *arguments: str) -> RoleProcess:
            environment = {"PYTHONPATH": str(REPOSITORY / "examples")}
            return stack.enter_context(RoleProcess(role, "--listen=127.0.0.1:0", AT, *arguments, **environment))

        scheduler = start("scheduler")
        at = f"--scheduler={scheduler.address}"
        server, graph = start("server", at), start("graph", at)
        with gt.connect(scheduler.address) as cluster:
            table = cluster.create_table("rows", dim=4, optimizer=gt.Adam(lr=0.1), admission=gt.MinCount(2))
            ids = np.arange(6)
            table.push(ids, np.ones((6, 4), np.float32))
            table.push(ids, np.ones((6, 4), np.float32))
            for _ in range(5):
                table.pull(ids)
            with pytest.raises(gt.errors.NonFinite):
                table.push(ids, np.full((6, 4), np.nan, np.float32))
        with gt.connect(scheduler.address, config=ClientConfig(shared_memory=False)) as cluster:
            cluster.table("rows").pull(np.arange(6))
        # A call is counted when it was answered: its caller may be here first.
        while pulls(told := scrape(server.facts["metrics"]), "tcp") != [1] or pulls(told, "ring") != [5]:
            pass
        yield Roles(scheduler, server, graph, start("slowgear", at, *GEAR), told)


def pulls(found: Scrape, carrier: str) -> list[float]:
    return found.values("geartrain_calls_total", shard=0, op="Pull", carrier=carrier, code="OK")


def test_a_server_tells_its_rows_and_how_calls_for_them_went(roles: Roles) -> None:
    found = roles.told
    assert found.value("geartrain_calls_total", op="Push", carrier="ring", code="OK") == 2
    assert found.value("geartrain_calls_total", op="Push", carrier="ring", code="NonFinite") == 1
    assert found.value("geartrain_calls_total", op="CreateTable", carrier="grpc", code="OK") == 1
    counted = found.values("geartrain_call_seconds_bucket", op="Pull", carrier="ring")
    assert counted == sorted(counted) and counted[-1] == 5
    assert 0 < found.value("geartrain_call_seconds_sum", op="Pull", carrier="ring") < 60
    assert found.value("geartrain_call_bytes_total", op="Pull", carrier="ring", direction="out") > 5 * 6 * 16
    assert found.value("geartrain_call_bytes_total", op="Push", carrier="ring", direction="in") > 2 * 6 * 16
    assert 0 < found.value("geartrain_busy_seconds_total", shard=0) < 60
    assert found.value("geartrain_table_rows", table="rows", shard=0) == 6
    assert found.value("geartrain_rows_admitted_total", table="rows", shard=0) == 6
    assert found.value("geartrain_ids_dropped_total", table="rows", shard=0, reason="not_admitted") == 6
    parts = {part: found.value("geartrain_table_bytes", table="rows", part=part) for part in ("rows", "slots", "index")}
    assert parts["slots"] > parts["rows"] >= 6 * 16 and parts["index"] > 0
    assert sum(parts.values()) < found.value("geartrain_table_memory_limit_bytes")


@pytest.mark.parametrize("role", ["scheduler", "server", "graph", "slowgear"])
def test_a_role_says_where_it_is_scraped(roles: Roles, role: str) -> None:
    facts = getattr(roles, role).facts
    pong = role_at(facts["addresses"][0] if role == "server" else facts["address"])
    assert pong is not None and pong.metrics == facts["metrics"]


@pytest.mark.parametrize("role", ["scheduler", "server", "graph", "slowgear"])
def test_the_page_lists_what_a_role_tells(roles: Roles, role: str) -> None:
    """Both ways: nothing is told that is not on the page, nor is there more on it."""
    titles = {"scheduler": "Scheduler", "server": "Server", "graph": "Graph service", "slowgear": "Slow gear"}
    listed = set()
    for title in ("Every role", "Calls", titles[role]):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
        assert section is not None, title
        for row in re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE):
            listed.update(re.findall(r"`(\w+)`", row))
    found = scrape(getattr(roles, role).facts["metrics"])
    assert set(found.kinds) == listed
    assert found.value("geartrain_build_info", role=role) == 1
