"""The page in headless Chromium: ``make page-check``; PAGE_OUT=FOLDER keeps pictures of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import JobReport
from tests.support.browsers import CONTRAST, faults_of, pictures_folder
from tests.support.role_process import RoleProcess

SHOWN_WITHIN_SECONDS = 3.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_people_see_what_happens(browser: Any, tmp_path: Path) -> None:
    pictures = pictures_folder(tmp_path)
    with (
        RoleProcess("scheduler", "--listen=127.0.0.1:0", "--num-shards=2", errors=tmp_path / "scheduler") as scheduler,
        RoleProcess("server", f"--scheduler={scheduler.address}", "--shard=0", errors=tmp_path / "0"),
        RoleProcess("server", f"--scheduler={scheduler.address}", "--shard=1", errors=tmp_path / "1") as server,
        RoleProcess("dashboard", f"--scheduler={scheduler.address}", "--listen=127.0.0.1:0") as dashboard,
        connect(scheduler.address, config=ClientConfig(), stream="clicks/rank0") as cluster,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        faults = faults_of(page)
        page.goto(dashboard.facts["url"])
        assert "key" not in page.url
        state = page.locator("#shards tbody tr", has_text=server.address).locator("td").first

        step = 0
        watch = cluster.watch_leaves("clicks", lambda: JobReport(step=step, last_step=5_000, loss=2 / (step + 2)))
        table = cluster.create_table("clicks/user", dim=16, optimizer=SGD(0.1))
        cards = page.locator("#jobs .card")
        for step in range(1, 4):
            table.assign(np.arange(1_000 * step), np.zeros((1_000 * step, 16), np.float32))
            page.wait_for_function("n => (curves['rows clicks/user'] || []).at(-1)?.[1] === n", arg=1_000 * step)
        page.wait_for_function("(curves['loss clicks'] || []).length > 1")
        cards.get_by_text("of 5,000").wait_for()
        path = str(cluster.snapshot(str(tmp_path / "snapshots"), step=step).result())
        page.get_by_role("button", name=f"Verify {path}").press("Enter")
        page.get_by_text("sound: every byte was read").wait_for()

        page.screenshot(path=pictures / "light.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=pictures / "dark.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 844})
        page.screenshot(path=pictures / "phone.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        server.process.kill()
        began = time.monotonic()
        page.wait_for_function(DIFFERS, arg=[server.address, "up"], timeout=20_000)
        gone_seconds = time.monotonic() - began
        page.screenshot(path=pictures / "killed.png", full_page=True)
        port = server.address.rpartition(":")[2]
        with RoleProcess(
            "server", f"--scheduler={scheduler.address}", "--shard=1", f"--ports={port}", errors=tmp_path / "again"
        ):
            began = time.monotonic()
            page.wait_for_function("at => stateOf(at) === 'up'".replace("stateOf", STATE_OF), arg=server.address)
            back_seconds = time.monotonic() - began
        print(f"a killed shard shows after {gone_seconds:.1f} s, and its return after {back_seconds:.1f} s")
        assert gone_seconds < SHOWN_WITHIN_SECONDS
        assert back_seconds < SHOWN_WITHIN_SECONDS
        assert state.count() == 1
        assert faults == []
        if watch is not None:
            watch.done()


STATE_OF = (
    "(at => [...document.querySelectorAll('#shards tbody tr')].find(row => row.textContent.includes(at))"
    ".cells[1].textContent)"
)
DIFFERS = f"([at, state]) => {STATE_OF}(at) !== state"
"""The shard at an address is shown in another state."""


def test_it_is_made_for_keyboards_and_screen_readers(browser: Any, tmp_path: Path) -> None:
    with (
        RoleProcess("scheduler", "--listen=127.0.0.1:0", errors=tmp_path / "scheduler") as scheduler,
        RoleProcess("dashboard", f"--scheduler={scheduler.address}", "--listen=127.0.0.1:0") as dashboard,
    ):
        page = browser.new_page()
        page.goto(dashboard.facts["url"])
        page.locator("#happened[aria-live=polite] li").first.wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the cluster"
        assert page.evaluate("[document.documentElement.lang, document.querySelectorAll('main, header').length]") == [
            *("en", 2)
        ]
        told = page.locator("table th:not([scope])")
        assert told.count() == 0
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) >= 4.5
