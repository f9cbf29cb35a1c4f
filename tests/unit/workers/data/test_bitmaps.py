import os
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageDraw, ImageFont

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.data import bitmaps
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES, Preprocessing, bright_ink, crop_ink, open_picture
from geartrain.workers.gear.objects import decode_image

INK = Preprocessing(kind="ink", size=32)


def letter(character: str = "R", *, paper: int = 255, pen: int = 0, offset: int = 20, em: int = 60) -> Image.Image:
    picture = Image.new("L", (160, 140), paper)
    ImageDraw.Draw(picture).text((offset, 10), character, pen, ImageFont.load_default(size=em))
    return picture


def difference(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(INK.bitmap(a).astype(int) - INK.bitmap(b).astype(int)).mean())


def test_dark_on_light_and_light_on_dark_give_the_same_bitmap() -> None:
    assert difference(letter(), letter(paper=0, pen=255)) < 1


def test_faint_ink_is_brought_to_full_contrast() -> None:
    assert difference(letter(), letter(paper=200, pen=120)) < 3


def test_position_and_size_of_the_ink_do_not_matter() -> None:
    assert difference(letter(), letter(offset=70)) < 1
    assert difference(letter(em=60), letter(em=90)) < 8
    assert difference(letter("R"), letter("X")) > 20


def test_colour_and_transparent_pictures_are_read_like_grey_ones() -> None:
    clear = Image.new("RGBA", (160, 140), (0, 0, 0, 0))
    ImageDraw.Draw(clear).text((20, 10), "R", (0, 0, 0, 255), ImageFont.load_default(size=60))
    assert difference(letter(), letter().convert("RGB")) == 0
    assert difference(letter(), clear) < 3
    assert difference(letter(), letter().convert("P")) == 0


def test_a_sixteen_bit_picture_is_read_at_its_own_range() -> None:
    deep = Image.fromarray(np.asarray(letter(), dtype=np.uint16) * 200)
    assert difference(letter(), deep) < 1


def test_the_ink_fills_the_bitmap_but_for_a_margin() -> None:
    bitmap = INK.bitmap(letter("H"))[0]
    rows, columns = np.flatnonzero(bitmap.max(1) > 40), np.flatnonzero(bitmap.max(0) > 40)
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (1, 30, 1, 30)


def test_a_flat_stroke_stays_flat() -> None:
    stroke = np.zeros((100, 100), np.uint8)
    stroke[48:52, 5:95] = 255
    bitmap = crop_ink(stroke, 32)
    assert bitmap is not None
    assert 0 < np.count_nonzero(bitmap.max(1) > 40) <= 5


def test_a_blank_picture_has_no_ink() -> None:
    assert crop_ink(bright_ink(np.full((20, 20), 250, np.uint8)), 32) is None
    with pytest.raises(InvalidArgument, match="blank"):
        INK.bitmap(Image.new("L", (50, 50), 250))


def test_impossible_preprocessing_is_refused() -> None:
    with pytest.raises(ConfigError, match="image size is 50"):
        Preprocessing(size=50)
    with pytest.raises(ConfigError, match="channels is 3"):
        Preprocessing(kind="ink", channels=3)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    letter().save(broken)
    broken.write_bytes(broken.read_bytes()[:200])
    text = tmp_path / "text.png"
    text.write_text("not an image")
    for path in (broken, text, tmp_path / "absent.png"):
        with pytest.raises(InvalidArgument, match=path.name):
            open_picture(path)


def test_only_formats_of_images_are_decoded_whatever_a_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {started}\nexit 1\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (tmp_path / "cat.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(InvalidArgument, match=r"cat\.png is not a readable image"):
        open_picture(tmp_path / "cat.png")
    with pytest.raises(InvalidArgument):
        decode_image((tmp_path / "cat.png").read_bytes())
    assert not started.exists()
    for suffix in IMAGE_SUFFIXES:
        letter().save(tmp_path / f"r{suffix}")
        assert open_picture(tmp_path / f"r{suffix}").size == (160, 140)


def test_pictures_have_bounds_of_pixels_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Image.new("L", (4 << 10, (4 << 10) + 8), 255)  # some KiB on the disk
    large.save(tmp_path / "large.png")
    with pytest.raises(InvalidArgument, match=r"large\.png has 4096 x 4104 pixels, more than 16,777,216"):
        open_picture(tmp_path / "large.png")
    large.save(tmp_path / "large.jpg")
    assert open_picture(tmp_path / "large.jpg").size == (2048, 2052)
    Image.new("L", (10 << 10, 7 << 10)).save(tmp_path / "larger.jpg")
    with pytest.raises(InvalidArgument, match=r"larger\.jpg has 10240 x 7168 pixels"):
        open_picture(tmp_path / "larger.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 10)  # twice of it Pillow itself refuses to open
    with pytest.raises(InvalidArgument, match=r"large\.png has far more pixels than 16,777,216"):
        open_picture(tmp_path / "large.png")
    monkeypatch.undo()
    letter().save(tmp_path / "r.png")
    monkeypatch.setattr(bitmaps, "MAX_FILE_BYTES", 100)
    with pytest.raises(InvalidArgument, match=r"r\.png has [\d,]+ bytes, more than 100"):
        open_picture(tmp_path / "r.png")
