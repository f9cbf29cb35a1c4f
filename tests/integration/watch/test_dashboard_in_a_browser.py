"""The page in headless Chromium: ``make page-check``; PAGE_OUT=FOLDER keeps pictures of it."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster_status import scheduler_jobs
from geartrain.ams.client.factory import connect
from geartrain.ams.values.config import ClientConfig, ClusterConfig, ServerConfig
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import JobReport
from geartrain.watch.page import Dashboard
from tests.support.browsers import CONTRAST, faults_of, pictures_folder
from tests.support.role_process import RoleProcess

SHOWN_WITHIN_SECONDS = 3.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links lie."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


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
        rates = {"steps_per_second": 2.0, "samples_per_second": 512.0, "pull_ms": 3.1, "push_ms": 1.9}

        def report() -> JobReport:
            good = {"metric": "AUC", "metric_value": 0.5 + 0.1 * step}
            return JobReport(step=step, last_step=5_000, loss=2 / (step + 2), **good, **rates)  # type: ignore[arg-type]

        watch = cluster.report_job("clicks", report)
        table = cluster.create_table("clicks/user", dim=16, optimizer=SGD(0.1))
        cards = page.locator("#jobs .card")
        for step in range(1, 4):
            table.assign(np.arange(1_000 * step), np.zeros((1_000 * step, 16), np.float32))
            page.wait_for_function("n => (curves['rows clicks/user'] || []).at(-1)?.[2] === n", arg=1_000 * step)
        page.wait_for_function("(curves['loss clicks'] || []).length > 1")
        cards.get_by_text("of 5,000").wait_for()
        for curve in ("calls", "loss clicks", "metric clicks"):
            assert drawn(page, curve, "plot.axes.map(axis => axis._values.some(Boolean))") == [True, True]
        facts = cards.locator("dd").all_inner_texts()
        assert facts == ["0.4000", "0.8000", "42 min", "2", "512"]  # loss, AUC, time left, steps/s, samples/s
        assert re.fullmatch(
            r"[\d.]+ KiB of [\d.]+ GiB", page.locator("#shards td[data-label=memory]").first.inner_text()
        )
        path = str(cluster.snapshot(str(tmp_path / "snapshots"), step=step).result())
        page.get_by_role("button", name=f"Verify {path}").press("Enter")
        page.get_by_text("sound: every byte was read").wait_for()
        gone = Path(str(cluster.snapshot(str(tmp_path / "snapshots"), step=step + 1).result()))
        page.get_by_role("button", name=f"Verify {gone}").wait_for()
        shutil.rmtree(gone)
        page.get_by_role("button", name=f"Verify {gone}").wait_for(state="detached")
        listed = page.locator("#snapshots tbody th").evaluate_all("all => all.map(cell => cell.title)")
        assert listed == [path]

        page.screenshot(path=pictures / "light.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=pictures / "dark.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 844})
        page.screenshot(path=pictures / "phone.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CUT) == []
        cards.get_by_role("link", name="clicks").click()
        page.get_by_role("heading", name="Job clicks").wait_for()
        assert page.locator("#shards").is_hidden()
        captions = page.locator("#jobs figcaption span:visible").all_inner_texts()
        assert captions == [
            *(
                "Loss",
                "AUC on the validation",
                "Steps per second",
                "Samples per second",
                "Pull ms a step",
                "Push ms a step",
            )
        ]
        page.screenshot(path=pictures / "phone-job.png", full_page=True)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme="light")
        page.screenshot(path=pictures / "job.png", full_page=True)
        page.get_by_role("link", name="All jobs").click()
        page.locator("#shards").wait_for()

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
CUT = """[...document.querySelectorAll("td, th, dd, .scroll")]
  .filter(it => it.scrollWidth > it.clientWidth + 1 && it.clientWidth).map(it => it.textContent)"""
"""What is wider than its place."""
DIFFERS = f"([at, state]) => {STATE_OF}(at) !== state"
"""The shard at an address is shown in another state."""


def drawn(page: Any, name: str, what: str) -> Any:
    """Ask for ``what`` of the ``plot`` of a curve, as it is drawn now."""
    find = "[...charts.values()].find(chart => chart.name === name)"
    return page.evaluate(f"name => {{ drawAll(); const {{plot}} = {find}; return {what}; }}", name)


def test_a_curve_can_be_read(browser: Any, served: Any) -> None:
    cluster = served(1)
    shown = Dashboard(ClusterConfig(server=ServerConfig(scheduler=cluster.address)), "127.0.0.1:0")
    page = browser.new_page(viewport={"width": 1280, "height": 1200})
    faults = faults_of(page)
    try:
        page.goto(shown.url)
        page.get_by_text(f"geartrain worker ctr --data movielens --scheduler {cluster.address}").wait_for()
        page.wait_for_function("() => curves.calls?.length > 1")
        assert page.locator("figcaption", has_text="Calls per second").is_visible()
        assert drawn(page, "calls", "plot.valToPos(0, 'y') === plot.over.clientHeight")  # idle
        with connect(cluster.address, config=ClientConfig(), stream="job/rank0") as first:
            first.report_job("job", lambda: JobReport(step=190, last_step=400, steps_per_second=2.0, loss=0.5))
            page.wait_for_function("() => curves['loss job']?.length")
            page.locator("#jobs dd", has_text="105 s").or_(page.locator("#jobs dd", has_text="2 min")).wait_for()
            with connect(cluster.address, config=ClientConfig(), stream="job/rank0") as again:
                again.report_job("job", lambda: JobReport(step=150, last_step=400, steps_per_second=2.0, loss=0.5))
                page.locator("#happened li", has_text="recovery").wait_for()
                page.wait_for_function("() => curves['loss job'].at(-1)[1] === 150")

                curve = page.get_by_role("img", name="Loss over time")
                page.evaluate(SPIKED)
                assert "recovery at " in str(curve.get_attribute("aria-label"))
                assert drawn(page, "loss job", "plot.scales.y.max") < 1
                assert "1 off the scale" in page.locator("#jobs output").inner_text()
                page.select_option("#scale", "all")
                assert drawn(page, "loss job", "plot.scales.y.max") > 100
                page.select_option("#range", "60")
                assert 40 < drawn(page, "loss job", "plot.scales.x.max - plot.scales.x.min") <= 61
                page.select_option("#smooth", "0.9")
                assert drawn(page, "loss job", "plot.data[2].at(-40) !== plot.data[1].at(-40)")

                box = curve.locator(".u-over").bounding_box()
                middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
                page.mouse.move(*middle)
                page.locator("#jobs output", has_text="step 1").wait_for()
                page.mouse.down()
                page.mouse.move(middle[0] + 100, middle[1], steps=3)
                page.mouse.up()
                assert drawn(page, "loss job", "plot.scales.x.max - plot.scales.x.min") < 30
                page.get_by_role("button", name="Whole curves").click()
                page.select_option("#x", "step")
                page.get_by_role("img", name="Loss over steps").wait_for()
                assert drawn(page, "loss job", "plot.data[0].slice(-2)") == [149, 150]  # what was lost has gone
        assert faults == []
    finally:
        page.close()
        shown.stop(5)


SPIKED = """() => {
  const spiked = [...Array(200).keys()].map(i => [last.now - 200 + i, i, i === 170 ? 1000 : 0.5 + 0.01 * (i % 7)]);
  curves["loss job"] = [...spiked, ...curves["loss job"].slice(-1)];
  drawAll();
}"""
"""A curve that would be flat but for its percentiles."""


def test_jobs_keep_their_places(browser: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.watch.dashboard_state._POLL_SECONDS", 0.1)
    cluster = served(1)
    page = browser.new_page()
    with ExitStack() as stack:
        steps = itertools.count()

        def train(name: str) -> None:
            client = stack.enter_context(connect(cluster.address, config=ClientConfig(), stream=f"{name}/rank0"))
            client.report_job(name, lambda: JobReport(step=next(steps), loss=0.5))

        train("one")
        while not any(job.began_seconds_ago > 1 for job in scheduler_jobs(cluster.address)):
            time.sleep(0.1)
        shown = Dashboard(ClusterConfig(server=ServerConfig(scheduler=cluster.address)), "127.0.0.1:0")
        stack.callback(shown.stop, 5)
        stack.callback(page.close)
        page.goto(shown.url)
        for name in ("two", "three"):
            train(name)
            page.locator("#jobs h3", has_text=name).wait_for()
        orders = page.evaluate(ORDERS)
        old = page.locator("#jobs .card", has_text="before this dashboard").locator("h3 a")
        assert old.all_inner_texts() == ["one"]
        assert len(orders) == 30
        assert {tuple(order) for order in orders} == {("one", "two", "three")}
        assert next(steps) > 6  # each told again meanwhile


ORDERS = """() => new Promise(done => {
  const orders = [], hear = () => {
    orders.push([...document.querySelectorAll("#jobs h3 a")].map(link => link.textContent));
    if (orders.length < 30) return;
    source.removeEventListener("message", hear);
    done(orders);
  };
  source.addEventListener("message", hear);
})"""
"""The jobs of a page, in their order, after each of 30 looks."""


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
        page.locator("#words summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#words dd").first.is_visible()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) >= 4.5
