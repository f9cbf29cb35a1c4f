"""The page to try a model, in headless Chromium: ``make page-check``; PAGE_OUT=FOLDER keeps pictures of it."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from rich.console import Console

import geartrain as gt
from geartrain.ams.values.config import ClusterConfig, SecurityConfig
from geartrain.launch.certificates import create_authority, issue
from geartrain.launch.tokens import create_token
from geartrain.workers import jobs
from geartrain.workers.classify import class_pictures
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.samples import examples
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job.options import JobOptions
from geartrain.workers.models.export import export_model
from geartrain.workers.tdm.export import export_tree
from geartrain.workers.tdm.recipe import TdmRecipe
from tests.support.browsers import CONTRAST, faults_of, pictures_folder
from tests.support.command_line import typed
from tests.support.picture_models import picture_model
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, require_onnx
from tests.support.served_models import picture as noise
from tests.support.stand_in_service import OTHER, SAMPLE, StandInService
from tests.unit.serving.models.test_clicks_model import trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STROKES = [[(0.5, 0.1), (0.5, 0.8)], [(0.25, 0.3), (0.5, 0.3)], [(0.15, 0.5), (0.45, 0.45), (0.2, 0.8)]]
Opened = Callable[..., Any]


@pytest.fixture
def service() -> Iterator[StandInService]:
    serving = StandInService()
    yield serving
    serving.stop()


@pytest.fixture
def opened(browser: Any, service: StandInService) -> Iterator[Opened]:
    """Opens the page; nothing may go wrong in its script."""
    faults: list[list[str]] = []

    def open_page(place: str = "", **settings: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **settings})
        faults.append(faults_of(page))
        page.goto(f"{service.url}#{place}")
        page.get_by_role("tab").first.wait_for()
        return page

    yield open_page
    # What the network says is Chromium's, and the page tells it in words.
    assert [said for said in itertools.chain(*faults) if not said.startswith("Failed to load resource")] == []


def draw(page: Any, strokes: list[list[tuple[float, float]]] = STROKES) -> None:
    page.locator("canvas").hover()  # which waits until it keeps its place: a form may just have been made
    box = page.locator("canvas").bounding_box()
    for stroke in strokes:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=4)
        page.mouse.up()


def best(page: Any, text: str) -> None:
    """Wait until it is the first answer."""
    page.locator("#answers li", has_text=text).first.wait_for()


def settled(page: Any) -> None:
    """Wait until nothing is asked any more."""
    page.wait_for_function("() => running === 0 && !timer")


def picture(colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def upload(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": content}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_answers_as_one_draws(opened: Opened, service: StandInService, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    page.get_by_text("it answers as you draw").wait_for()
    draw(page, STROKES[:1])
    best(page, "U+6C38")
    assert page.locator("#answers li").count() == 5
    assert page.locator("#answers .glyph").all_text_contents() == ["永", "水", "氷", "承", "求"]
    page.get_by_text("version 120").wait_for()
    page.locator("#best", has_text="Best: 永, cosine 0.83").wait_for(state="attached")
    operation, query, body = service.asked[-1]
    assert (operation, query) == ("classify", "k=5")
    sent = Image.open(io.BytesIO(body)).convert("L")
    assert (sent.getpixel((128, 100)), sent.getpixel((10, 10))) == (0, 255)  # ink is dark, on paper of any colour

    settled(page)
    with_one = service.asked[-1][2]
    service.best = "火"
    draw(page, STROKES[1:2])
    best(page, "U+706B")
    settled(page)
    with_two = service.asked[-1][2]
    page.keyboard.press("Control+z")
    settled(page)
    assert with_one == service.asked[-1][2] != with_two
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("it answers as you draw").wait_for()
    assert page.get_by_role("button", name="Undo").is_disabled()


def test_an_answer_that_comes_late_takes_the_place_of_no_newer_one(opened: Opened, service: StandInService) -> None:
    page = opened()
    late = service.holding = asyncio.Event()
    draw(page, STROKES[:1])
    while service.holding is not None:
        page.wait_for_timeout(10)
    service.best = "火"
    draw(page, STROKES[1:])
    best(page, "U+706B")
    service.call_soon(late.set)
    page.wait_for_function("() => running === 0")
    assert page.locator("#answers .glyph").first.text_content() == "火"


def test_a_picture_is_sent_as_it_is(opened: Opened, service: StandInService) -> None:
    page = opened()
    page.locator("label", has_text="Choose a picture").locator("input").set_input_files(upload("a.png", picture()))
    best(page, "U+6C38")
    assert service.asked[-1][2] == picture()
    for kind, name in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        other = picture((0, len(kind), 0))
        page.evaluate(HAND_OVER, [kind, name, base64.b64encode(other).decode()])
        page.locator("#curl", has_text=f"'@{kind}.png'").wait_for()
        settled(page)
        assert service.asked[-1][2] == other


HAND_OVER = """([kind, name, base64]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  transfer.items.add(new File([bytes], `${kind}.png`, {type: "image/png"}));
  const event = new (kind === "drop" ? DragEvent : Event)(kind, {bubbles: true, cancelable: true});
  Object.defineProperty(event, name, {value: transfer});
  document.querySelector("canvas").dispatchEvent(event);
}"""
"""What a hand does that drops a picture onto the canvas, or pastes one."""


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl: apt-get install curl")
def test_the_line_of_curl_asks_the_same(opened: Opened, service: StandInService, tmp_path: Path) -> None:
    page = opened()
    draw(page)
    best(page, "U+6C38")
    settled(page)
    done = by_hand(page, tmp_path)
    assert [one["class"] for one in done["answers"][0]][:2] == ["永", "水"]
    assert service.asked[-1] == service.asked[-2]

    page.select_option("#model", "faces")
    page.get_by_role("tab", name="Picture").wait_for()
    page.get_by_role("tab", name="Pair").click()
    for i, colour in enumerate([(1, 2, 3), (3, 2, 1)]):
        (tmp_path / f"it's {i}.png").write_bytes(picture(colour))
        page.locator(".zone input").nth(i).set_input_files(tmp_path / f"it's {i}.png")
    page.get_by_text("Not the same").wait_for()
    assert by_hand(page, tmp_path)["answers"] == [{"score": 0.12, "same": False, "threshold": 0.35}]
    assert json.loads(service.asked[-1][2]) == json.loads(service.asked[-2][2])

    page.select_option("#model", "clicks")
    page.get_by_text("probability of a click").wait_for()
    settled(page)
    by_hand(page, tmp_path)
    assert json.loads(service.asked[-1][2]) == json.loads(service.asked[-2][2])


def by_hand(page: Any, folder: Path) -> dict[str, Any]:
    """What the line answers in a shell in ``folder``."""
    line = page.evaluate("curl")
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=30)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_answers_and_some_classes_are_shown_as_training_saw_them(opened: Opened, service: StandInService) -> None:
    page = opened("signs")
    some = page.get_by_role("button", name="Class ")
    assert some.count() == 6
    some.first.locator("img").wait_for()
    some.first.press("Enter")
    best(page, "sign-000")
    page.locator("#answers .glyph img").nth(4).wait_for()
    sent = Image.open(io.BytesIO(service.asked[-1][2])).convert("L")
    assert sent.size == (256, 256) and sent.getpixel((34, 34)) < 100 < 200 < sent.getpixel(
        (240, 240)
    )  # the class itself
    page.select_option("#model", "glyphs")
    page.get_by_text("it answers as you draw").wait_for()
    assert some.count() == 0


def test_classes_whose_pictures_do_not_come_are_named(opened: Opened) -> None:
    page = opened("glyphs")
    page.route(re.compile("/picture"), lambda route: route.abort())
    page.select_option("#model", "signs")
    page.get_by_text("Some of its classes").wait_for(state="hidden")
    draw(page)
    best(page, "sign-000")
    page.locator("#answers .glyph", has_text="?").nth(4).wait_for()


def test_two_faces_are_the_same_or_not(opened: Opened) -> None:
    page = opened("faces/verify")
    zones = page.locator(".zone input")
    zones.nth(0).set_input_files(upload("a.png", picture()))
    page.get_by_text("it says whether they show the same").wait_for()
    zones.nth(1).set_input_files(upload("b.png", picture()))
    page.get_by_text("The same", exact=True).wait_for()
    page.get_by_text("cosine 0.970; the same from 0.350 on").wait_for()
    page.get_by_text("right for 99.8 % of them").wait_for()
    zones.nth(1).set_input_files(upload("c.png", picture((0, 0, 0))))
    page.get_by_text("Not the same", exact=True).wait_for()
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("it says whether they show the same").wait_for()


def test_a_pair_is_not_decided_without_a_threshold(opened: Opened, service: StandInService) -> None:
    service.verifies = False
    page = opened("faces/verify")
    page.get_by_text("Give it two pictures: it says how alike they are.").wait_for()
    for i in range(2):
        page.locator(".zone input").nth(i).set_input_files(upload("a.png", picture()))
    page.get_by_text("It does not say whether they show the same").wait_for()
    assert page.locator("#answers .large").text_content() == "0.970"
    page.get_by_text("cosine of their features").wait_for()
    assert page.get_by_text("The same", exact=True).count() == 0


def test_scores_have_names_and_a_low_one_is_unsure(opened: Opened, service: StandInService) -> None:
    page = opened()
    draw(page)
    best(page, "U+6C38")
    assert page.locator("#answers .score").first.text_content() == "cosine 0.830"
    page.get_by_text("From 0.500 on, 95.0 % of 600 held-out images were named rightly at export").wait_for()
    assert page.locator("#unsure").is_hidden()
    service.best_score = 0.4
    draw(page, STROKES[:1])
    page.get_by_text("Unsure: the best cosine is below 0.500").wait_for()
    page.select_option("#version", "90")  # the threshold is that of the current version
    page.locator("#unsure").wait_for(state="hidden")
    for place, name in (("clicks/rank", "probability"), ("tree", "log-odds")):
        page.goto(f"{service.url}#{place}")
        page.locator("#answers .score", has_text=name).first.wait_for()


def test_nearest_takes_what_embed_gave(opened: Opened, service: StandInService) -> None:
    page = opened("glyphs/embed")
    page.locator("#asked input").first.set_input_files(upload("a.png", picture()))
    page.get_by_role("button", name="Find the nearest classes").click()
    best(page, "U+6C38")
    operation, _, body = service.asked[-1]
    assert (operation, json.loads(body)) == ("nearest", {"features": [[0.1, -0.2, 0.3]]})
    assert page.get_by_role("tab", name="Nearest").get_attribute("aria-selected") == "true"


def numbers(page: Any) -> list[float]:
    """Those of an explained click: the base, contributions, log-odds."""
    return [float(text.replace("−", "-")) for text in page.locator(".shares dd").all_text_contents()]


def require_sum(page: Any) -> None:
    """Base and contributions add up to the log-odds, which are the probability, as far as digits are shown."""
    base, *parts, odds = numbers(page)
    assert base + sum(parts) == pytest.approx(odds, abs=0.0005 * (len(parts) + 2))
    shown = float(page.locator("#answers .large").first.text_content().removesuffix(" %"))
    assert shown == pytest.approx(100 / (1 + math.exp(-odds)), abs=0.07)


def test_a_form_begins_with_a_sample_and_offers_what_training_had(opened: Opened, service: StandInService) -> None:
    page = opened("clicks")
    page.get_by_text("It begins with a sample of the training data").wait_for()
    page.get_by_text("base", exact=True).wait_for()
    settled(page)
    require_sum(page)
    page.get_by_role("button", name="Another sample").click()
    page.locator("#curl", has_text='"user": []').wait_for()
    settled(page)
    assert json.loads(service.asked[-1][2])["samples"] == [OTHER]
    page.get_by_role("combobox", name="item", exact=True).select_option("Babe (1995)")  # its other fields come along
    page.get_by_label("Add to genre").select_option("Drama")
    page.get_by_role("combobox", name="occupation", exact=True).select_option("nothing")
    page.locator("#curl", has_text='"occupation": []').wait_for()
    settled(page)
    sample = json.loads(service.asked[-1][2])["samples"][0]
    assert (sample["item"], sample["genre"], sample["occupation"]) == (8, ["Comedy", "Drama"], [])
    page.get_by_role("combobox", name="occupation", exact=True).select_option("another value …")
    page.keyboard.type("astronaut")
    page.get_by_label("age").fill("404")
    page.get_by_text("never seen").nth(1).wait_for()
    assert page.locator(".note:not(:empty)").count() == 2
    page.get_by_label("age").fill("15")
    page.wait_for_function("() => document.querySelectorAll('.note:not(:empty)').length === 1")


def test_a_refusal_marks_the_field_that_it_names(opened: Opened, service: StandInService) -> None:
    page = opened("clicks")
    page.get_by_role("button", name="Add another").click()
    page.get_by_text("probability of a click, sample 2").wait_for()
    settled(page)
    service.refusal = 400, "field 'age' of sample 1 is 'old'; the model was trained on integers there"
    page.get_by_label("age").nth(1).fill("old")
    page.locator("[aria-invalid=true]").wait_for()
    assert [one.get_attribute("aria-invalid") for one in page.get_by_label("age").all()] == [None, "true"]
    page.get_by_label("user").nth(0).press("Enter")
    page.wait_for_function("() => document.activeElement.getAttribute('aria-invalid') === 'true'")
    service.refusal = None
    page.get_by_label("age").nth(1).fill("15")
    page.locator("[aria-invalid]").wait_for(state="detached")


def test_a_form_of_the_schema_says_what_each_field_contributed(opened: Opened, service: StandInService) -> None:
    page = opened("clicks")
    page.get_by_text("probability of a click").wait_for()
    assert json.loads(service.asked[-1][2]) == {"samples": [SAMPLE], "explain": True}  # ids of 64 bits are whole
    assert page.locator(".shares dt").nth(1).text_content() == "user"
    assert page.locator(".shares dd").nth(2).text_content() == "−0.650"
    page.get_by_text("Nothing from query.").wait_for()
    page.get_by_label("history").fill("[[5, 1], [6, 0]]")
    page.get_by_label("genre", exact=True).fill("5, 6")
    page.get_by_label("city").fill("Oslo, Norway")
    page.get_by_label("device").fill("9007199254740993")
    page.wait_for_function("() => document.querySelector('#curl').textContent.includes('9007199254740993')")
    settled(page)
    sample = json.loads(service.asked[-1][2])["samples"][0]
    assert [sample[name] for name in ("history", "genre", "city", "device")] == [
        *([[5, 1], [6, 0]], [5, 6], "Oslo, Norway", 9007199254740993)
    ]
    service.refusal = 400, "age is 'old'; the model takes an id, such as 15"
    page.get_by_label("age").fill("old")
    page.get_by_role("alert").get_by_text("Age is 'old'; the model takes an id, such as 15").wait_for()
    assert json.loads(service.asked[-1][2])["samples"][0]["age"] == "old"
    service.refusal = None
    page.get_by_label("age").fill("15")
    page.locator("#said").wait_for(state="hidden")
    page.get_by_role("button", name="Add another").click()
    page.get_by_text("probability of a click, sample 2").wait_for()


def test_candidates_are_added_and_ranked(opened: Opened, service: StandInService) -> None:
    page = opened("clicks/rank")
    page.locator("#answers li").nth(1).wait_for()
    page.get_by_role("button", name="Add another").press("Enter")
    page.locator("#answers li").nth(2).wait_for()
    for key in ("Tab", "End", "7"):  # where the new one is, as a copy of the last
        page.keyboard.press(key)
    page.wait_for_function("() => document.querySelector('#curl').textContent.includes('997')")
    page.get_by_role("button", name="Remove").first.click()
    page.wait_for_function("() => document.querySelectorAll('#answers li').length === 2")
    asked = json.loads(service.asked[-1][2])
    assert [candidate["item"] for candidate in asked["candidates"]] == [99, 997]
    assert page.locator("#answers .name").last.text_content() == 'item 997, genre "comedy"'
    page.goto(f"{service.url}#tree")
    page.reload()
    best(page, "Star Wars (1977)")
    page.locator("#answers li", has_text=f"item {2**62 + 1}").wait_for()


def test_a_swap_is_said_and_followed(opened: Opened, service: StandInService) -> None:
    page = opened()
    draw(page)
    page.get_by_text("version 120").wait_for()
    service.current, service.canary = 130, 135
    page.get_by_text("Version 130 is served now; it was 120.").wait_for()
    page.locator("#from", has_text="version 130").wait_for()
    names = page.locator("#version option").all_text_contents()
    assert names == ["current: 130", "canary: 135, 10 % of requests", "older: 100"]
    page.select_option("#version", "100")
    page.locator("#from", has_text="version 100").wait_for()
    assert "version=100" in service.asked[-1][1]
    service.current, service.canary = 140, None
    page.get_by_text("Version 100 is gone; the current one is asked.").wait_for()
    page.locator("#from", has_text="version 140").wait_for()


def test_a_service_that_is_gone_is_said_and_found_again(opened: Opened, service: StandInService) -> None:
    page = opened()
    draw(page)
    best(page, "U+6C38")
    service.stop()
    page.get_by_text("The service does not answer; asked again until it does.").wait_for()
    page.get_by_text("no answer").wait_for()
    service.best = "火"
    draw(page, STROKES[:1])
    service.start()
    best(page, "U+706B")
    page.get_by_text("ready").wait_for()
    assert page.get_by_text("asked again").count() == 0

    service.refusal = 503, "64 requests wait already; ask again in a second"
    draw(page, STROKES[:1])
    page.get_by_role("alert").get_by_text("64 requests wait already").wait_for()
    service.refusal = None
    page.locator("#said").wait_for(state="hidden")  # it asks again by itself


def test_where_nothing_is_served_yet_it_waits(browser: Any, service: StandInService) -> None:
    service.is_empty = True
    page = browser.new_page()
    page.goto(service.url)
    page.get_by_text("No model is served yet").wait_for()
    service.is_empty = False
    page.get_by_role("tab", name="Draw").wait_for()


def test_a_token_is_asked_for_and_kept_out_of_the_line_of_curl(browser: Any, service: StandInService) -> None:
    service.token = "s3cret"
    page = browser.new_page()
    page.goto(service.url)
    page.get_by_text("No token; send one").wait_for()
    page.get_by_label("Token").fill("s3cret")
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Draw").click()
    draw(page)
    best(page, "U+6C38")
    assert '"Authorization: Bearer $TOKEN"' in page.locator("#curl").text_content()
    assert "s3cret" not in page.content()


def test_it_is_made_for_keyboards_and_screen_readers(opened: Opened, service: StandInService) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the model"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "panel"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"
    for key in ("ArrowUp", "ArrowUp", "Space", "ArrowDown", "ArrowDown", "Shift+ArrowRight"):
        page.keyboard.press(key)
    best(page, "U+6C38")
    assert page.locator("canvas").get_attribute("aria-label") == "Draw here: a stroke"
    settled(page)
    sent = Image.open(io.BytesIO(service.asked[-1][2])).convert("L")
    assert (sent.getpixel((128, 116)), sent.getpixel((158, 128)), sent.getpixel((98, 128))) == (0, 0, 255)
    page.get_by_role("tab", name="Draw").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Pair"
    page.get_by_text("it says whether they show the same").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) >= 4.5
    for model in ("glyphs", "faces", "clicks", "tree"):
        page.select_option("#model", model)
        page.wait_for_function("name => model?.name === name", arg=model)
        assert page.evaluate(UNNAMED) == []


UNNAMED = """() => [...document.querySelectorAll("input, select, textarea, canvas, button, [role=tabpanel]")]
  .filter(one => ![one.labels?.[0]?.textContent, one.textContent, one.ariaLabel, one.getAttribute("aria-labelledby")]
    .some(name => name?.trim()))
  .map(one => one.outerHTML)"""
"""What a screen reader has no name for."""


def test_it_fits_a_phone_in_light_and_dark(opened: Opened, tmp_path: Path) -> None:
    pictures = pictures_folder(tmp_path)
    for name, settings in {
        "light": {},
        "dark": {"color_scheme": "dark"},
        "phone": {"viewport": {"width": 360, "height": 780}, "has_touch": True, "is_mobile": True},
    }.items():
        page = opened(**settings)
        draw(page)
        best(page, "U+6C38")
        page.screenshot(path=pictures / f"try-{name}.png", full_page=True)
        page.select_option("#model", "signs")
        page.get_by_role("button", name="Class ").first.click()
        best(page, "sign-000")
        settled(page)
        page.screenshot(path=pictures / f"try-signs-{name}.png", full_page=True)
        low = page.locator("#answers .score").last.bounding_box()
        assert low["y"] + low["height"] <= page.viewport_size["height"]  # all five are seen beside what is drawn
        for model, tab in (("faces", "Pair"), ("clicks", "Click"), ("clicks", "Rank"), ("tree", "Tree")):
            page.select_option("#model", model)
            page.get_by_role("tab", name=tab).click()
            settled(page)
            page.screenshot(path=pictures / f"try-{tab.lower()}-{name}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_it_asks_a_real_service_and_follows_its_rollback(browser: Any, tmp_path: Path) -> None:
    require_onnx()
    names = [f"sign-{number}" for number in range(8)]
    model = picture_model(torch.randn(8, 16), names, Preprocessing(kind="ink", size=16, channels=1))
    shades = np.random.default_rng(0).integers(0, 256, (8, 1, 16, 16), np.uint8)
    class_pictures.write_class_pictures(tmp_path, names, np.arange(8), 16, lambda places: shades[places])

    def finish(staging: Path, *_: object) -> dict[str, Any]:
        class_pictures.bring(tmp_path, staging, 8)
        return {}

    for version in (1, 2):
        export_model(model, tmp_path / "signs" / f"{version:06}", version=version, finish=finish)
    with RoleProcess("serve", str(tmp_path / "signs"), "--listen=127.0.0.1:0", errors=tmp_path / "errors") as service:
        page = browser.new_page()
        faults = faults_of(page)
        page.goto(service.facts["url"])
        page.get_by_role("button", name="Class ").nth(5).locator("img").wait_for()
        draw(page)
        page.locator("#answers .glyph img").nth(4).wait_for()
        assert page.locator("#answers .name").first.text_content() in names
        page.locator("#from", has_text="version 2").wait_for()
        assert typed("rollback", service.address, "--to=1").returncode == 0
        page.get_by_text("Version 1 is served now; it was 2.").wait_for()
        page.locator("#from", has_text="version 1").wait_for()
        page.get_by_role("tab", name="Pair").click()
        sheet = Image.new("L", (60, 60), 255)
        ImageDraw.Draw(sheet).line([(5, 5), (30, 50), (50, 20)], 0, 6)
        sheet.save(tmp_path / "a.png")
        for place in range(2):
            page.locator(".zone input").nth(place).set_input_files(tmp_path / "a.png")
        page.locator("#answers", has_text="1.000").wait_for()
        assert faults == []
        page.locator(".zone input").nth(1).set_input_files(upload("b.png", b"no picture"))
        page.get_by_role("alert").get_by_text("Pairs[0][1]").wait_for()


def test_forms_of_a_real_service_begin_with_the_training_and_add_up(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_onnx()
    monkeypatch.setattr(examples, "PEOPLE", 4)  # there are twelve users
    recipe = TdmRecipe(dim=4, hidden=(8,), batch_size=40, steps=15, rebuilds=0, beam=50, history=5)
    run = trained(tmp_path, "wide_deep", 4)
    options = JobOptions(job="tdm", out=tmp_path / "users", recipe=recipe, data=str(tmp_path / "films"), loggers=())
    jobs.train(options, Console(quiet=True))
    export_clicks(run, tmp_path / "clicks", cache=tmp_path, say=print)
    export_tree(tmp_path / "users", tmp_path / "tree")
    models = [str(tmp_path / name) for name in ("clicks", "tree")]
    with RoleProcess("serve", *models, "--listen=127.0.0.1:0", errors=tmp_path / "errors") as service:
        page = browser.new_page()
        faults = faults_of(page)
        page.goto(f"{service.facts['url']}#clicks/click")
        page.get_by_text("It begins with a sample of the training data").wait_for()
        page.get_by_text("base", exact=True).wait_for()
        films = page.get_by_role("combobox", name="item", exact=True).locator("option:checked")
        assert films.text_content().startswith("Film ")
        assert page.get_by_label("user").input_value() == ""
        for user, notes in (("3", 0), (str(10**15), 1)):
            page.get_by_label("user").fill(user)
            page.wait_for_function(
                "([user, notes]) => document.querySelector('#curl').textContent.includes(user) && running === 0"
                " && !timer && document.querySelectorAll('.note:not(:empty)').length === notes",
                arg=[user, notes],
            )
            require_sum(page)
        assert faults == []
        page.get_by_label("age").fill("old")
        page.get_by_role("alert").get_by_text("Field 'age' of sample 0 is 'old'").wait_for()
        assert page.locator("[aria-invalid=true]").get_attribute("data-field") == "age"
        page.goto(f"{service.facts['url']}#tree/items")
        page.locator("#answers .name", has_text="Film ").nth(4).wait_for()
        page.get_by_label("Add to history").select_option("Film 3 (1983)")
        page.locator("#curl", has_text=", 3]").wait_for()


def test_under_tokens_the_page_of_a_real_service_asks_for_one(browser: Any, tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    create_authority(certificates, "test")
    issue(certificates, certificates, ["serve"])
    create_token(certificates, "reader", ["signs=read"], 1)
    token = (certificates / "reader.token").read_text(encoding="utf-8").strip()
    config = ClusterConfig(security=SecurityConfig(folder=str(certificates)))
    with gt.ops.Role("serve", config, listen="127.0.0.1:0", models=[f"signs={exported(tmp_path / 'model')}"]) as role:
        page = browser.new_page(ignore_https_errors=True)
        page.goto(f"https://{role.address}/")
        page.get_by_text("It shows no token").wait_for()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Use it").click()
        page.locator("label", has_text="Choose a picture").locator("input").set_input_files(upload("a.png", noise(1)))
        page.locator("#answers li").nth(4).wait_for()
        page.get_by_text("ready").wait_for()
