"""The quickstart on a small alphabet: the whole job, with fonts made from Pillow's built-in one."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fontTools.ttLib import TTFont
from PIL import Image, ImageFont
from rich.console import Console
from safetensors.torch import load_file

from geartrain.workers import jobs
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.recipes import glyphs
from geartrain.workers.recipes.fonts import FACES, FontFile
from geartrain.workers.recipes.recipe import GlyphRecipe
from tests.integration.jobs.test_classify_and_predict import one_thread

__all__ = ["one_thread"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijmnqrtuy23456789"
FIRST_CODE = 0x4E00
QUIET = Console(file=io.StringIO())
RECIPE = GlyphRecipe(steps=30, batch_size=32, width=8, dim=32, sample_rate=0.5, warmup_steps=5)


def make_font(path: Path, slant: float) -> None:
    """A slanted copy of the built-in font in which CJK code points show Latin letters."""
    content = ImageFont.load_default(size=20).path  # type: ignore[union-attr]
    assert isinstance(content, BytesIO)
    font = TTFont(BytesIO(content.getvalue()))
    letters = font.getBestCmap()
    for name in set(letters.values()) & set(font["glyf"].keys()):
        glyph = font["glyf"][name]
        if glyph.numberOfContours > 0:
            glyph.coordinates.transform(((1, 0), (slant, 1)))
            glyph.recalcBounds(font["glyf"])
    for table in font["cmap"].tables:
        if table.isUnicode():
            table.cmap = {FIRST_CODE + place: letters[ord(letter)] for place, letter in enumerate(LETTERS)}
    font.save(path)


@pytest.fixture(autouse=True)
def small_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["noto-sans-cjk-regular", "noto-sans-cjk-light", "wqy-microhei", "ipaex-gothic"]
    found = []
    for name, slant in zip(names, (0.0, 0.2, 0.1, -0.1), strict=True):
        path = tmp_path / f"{name}.ttf"
        make_font(path, slant)
        face = next(face for face in FACES if face.name == name)
        found.append(FontFile(face, path, 0, hashlib.sha256(path.read_bytes()).hexdigest()))

    def find(_cache: Path, **_: object) -> Sequence[FontFile]:
        return found

    monkeypatch.setattr(glyphs, "find_fonts", find)


def train(out: Path, recipe: GlyphRecipe = RECIPE, **changes: Any) -> JobResult:
    options = JobOptions(job="glyphs", out=out, recipe=recipe, device="cpu", cache=out.parent / "cache", **changes)
    return jobs.train(options, QUIET)


def test_the_quickstart_leaves_a_report_a_model_mistakes_and_events(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(out)
    report = json.loads((out / "report.json").read_text())
    assert result.finished and result.report == report
    expected = {"held_out", "recipe", "steps", "train_seconds", "samples_per_second", "phases", "versions", "lr"}
    assert set(report) == expected | {"steps_per_epoch", "epochs"}
    assert set(report["held_out"]) == {"WenQuanYi Micro Hei", "IPAex Gothic"}
    for family in report["held_out"].values():
        assert list(family) == ["top1", "top5", "classes", "images"]
        assert family["classes"] == family["images"] == len(LETTERS)
        assert 0.8 < family["top1"] <= family["top5"] <= 1
    assert report["train_seconds"] > 0 and report["samples_per_second"] > 0
    with Image.open(out / "mistakes.png") as picture:
        assert picture.format == "PNG"
    assert list((out / "events").rglob("events.out.tfevents.*"))
    assert {path.name for path in (out / "model").iterdir()} == {
        "backbone.safetensors",
        "centers.safetensors",
        "config.json",
        "names.safetensors",
    }
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert load_file(out / "model" / "centers.safetensors")["centers"].shape == (len(LETTERS), 32)


def test_drawn_characters_are_cached_with_a_manifest(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = glyphs.load_glyphs(cache, 32, None, QUIET)
    manifests = sorted(cache.glob("bitmaps/*/manifest.json"))
    facts = [json.loads(path.read_text()) for path in manifests]
    assert {fact["family"] for fact in facts} == {"Noto Sans CJK", "WenQuanYi Micro Hei", "IPAex Gothic"}
    assert all(fact["characters"] == len(LETTERS) and fact["pillow"] and fact["font_sha256"] for fact in facts)
    written = [path.stat().st_mtime_ns for path in manifests]
    again = glyphs.load_glyphs(cache, 32, None, QUIET)
    assert [path.stat().st_mtime_ns for path in manifests] == written
    assert (again.train.bitmaps == first.train.bitmaps).all()
    assert len(first.train) == 2 * len(LETTERS)


def test_training_sees_no_image_of_a_held_out_family(tmp_path: Path) -> None:
    data = glyphs.load_glyphs(tmp_path / "cache", 32, None, QUIET)
    seen = {bytes(bitmap.numpy()) for bitmap in data.train.bitmaps}
    # A dash-like letter may look the same in any slant; whole families must not.
    for images in data.held_out.values():
        leaked = sum(bytes(bitmap.numpy()) in seen for bitmap in images.bitmaps)
        assert leaked <= 0.1 * len(images)
