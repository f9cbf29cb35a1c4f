from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageFont

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.recipes.fonts import FACES, FontFile
from geartrain.workers.recipes.glyphs import assemble
from geartrain.workers.recipes.render import RenderedFace, characters_of, draw_characters


@pytest.fixture
def latin_font(tmp_path: Path) -> Path:
    path = tmp_path / "latin.ttf"
    content = ImageFont.load_default(size=20).path  # type: ignore[union-attr]
    assert isinstance(content, BytesIO)
    path.write_bytes(content.getvalue())
    return path


def rendered(name: str, code_points: list[int]) -> RenderedFace:
    face = next(face for face in FACES if face.name == name)
    bitmaps = np.stack([np.full((32, 32), code % 251, np.uint8) for code in code_points])
    return RenderedFace(FontFile(face, Path("unused"), 0, face.sha256), bitmaps, np.array(code_points, np.int64))


def test_drawing_is_deterministic(latin_font: Path) -> None:
    first, usable = draw_characters(latin_font, 0, range(65, 91), 32)
    again, _ = draw_characters(latin_font, 0, range(65, 91), 32)
    assert usable.all()
    assert np.array_equal(first, again)
    assert first.shape == (26, 32, 32) and first.dtype == np.uint8


def test_blanks_and_missing_characters_are_not_usable(latin_font: Path) -> None:
    _, usable = draw_characters(latin_font, 0, [65, 0x20, 0x4E00, 66], 32)
    assert usable.tolist() == [True, False, False, True]


def test_a_damaged_font_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.otf"
    path.write_bytes(b"OTTO" + bytes(100))
    with pytest.raises(ConfigError, match=r"damaged\.otf"):
        characters_of(FontFile(FACES[0], path, 0, ""))


def test_classes_are_the_characters_of_the_regular_face_and_tests_keep_only_those() -> None:
    faces = [
        rendered("noto-sans-cjk-regular", [10, 20, 30, 40]),
        rendered("noto-serif-sc", [20, 40, 50]),
        rendered("wqy-microhei", [5, 20, 30]),
        rendered("ipaex-gothic", [40]),
    ]
    data = assemble(faces, None)
    assert data.class_names == [chr(code) for code in (10, 20, 30, 40)]
    assert data.train.labels.tolist() == [0, 1, 2, 3, 1, 3]
    assert data.train.bitmaps[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 20, 40]
    assert data.held_out["WenQuanYi Micro Hei"].labels.tolist() == [1, 2]
    assert data.held_out["IPAex Gothic"].labels.tolist() == [3]


def test_a_small_run_takes_classes_evenly_and_refuses_impossible_numbers() -> None:
    faces = [rendered("noto-sans-cjk-regular", [10, 20, 30, 40]), rendered("wqy-microhei", [10, 30])]
    assert assemble(faces, 2).class_names == [chr(10), chr(30)]
    for count in (1, 5):
        with pytest.raises(ConfigError, match=r"\[2, 4\]"):
            assemble(faces, count)


def test_faces_need_both_roles_and_a_family_has_one() -> None:
    train, held_out = rendered("noto-sans-cjk-regular", [10, 20]), rendered("wqy-microhei", [10])
    for one_side, error in (([train], "1 training faces and 0 held-out ones"), ([held_out], "0 training faces and 1 ")):
        with pytest.raises(ConfigError, match=error):
            assemble(one_side, None)
    same_family = replace(held_out.font.face, family=train.font.face.family)
    with pytest.raises(ConfigError, match=rf"families \['{train.font.face.family}'\] have faces for training"):
        assemble([train, replace(held_out, font=replace(held_out.font, face=same_family))], None)
