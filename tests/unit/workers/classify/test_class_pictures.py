"""What classes look like: kept once, taken along by an export, and shown as ink on paper."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from geartrain.workers.classify import class_pictures
from geartrain.workers.classify.class_pictures import ClassPictures

IMAGES = np.zeros((4, 1, 8, 8), np.uint8)
for place in range(4):
    IMAGES[place, 0, place] = 255
LABELS = np.array([2, 0, 2, 0])


def keep(folder: Path, names: list[str]) -> ClassPictures:
    class_pictures.write_class_pictures(folder, names, LABELS, 8, lambda places: IMAGES[places])
    return ClassPictures(folder)


def test_the_first_image_of_a_class_is_shown_dark_on_white(tmp_path: Path) -> None:
    pictures = keep(tmp_path, ["first", "without", "third"])
    for label, row in ((0, 1), (2, 0)):
        file = pictures.png(label)
        assert file is not None
        shown = np.asarray(Image.open(io.BytesIO(file)))
        assert (shown[row] == 0).all() and (np.delete(shown, row, 0) == 255).all()
    assert pictures.png(1) is pictures.png(3) is pictures.png(-1) is None


def test_characters_show_themselves_and_too_many_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keep(tmp_path, ["a", "b", "c"])
    monkeypatch.setattr(class_pictures, "_MAX_BYTES", 3 * 64 - 1)
    assert not keep(tmp_path, ["first", "without", "third"])
    assert not any(tmp_path.iterdir())


def test_an_export_takes_those_of_its_classes_alone(tmp_path: Path) -> None:
    keep(tmp_path, ["first", "without", "third"])
    (tmp_path / "export").mkdir()
    class_pictures.bring(tmp_path, tmp_path / "export", 4)
    assert not ClassPictures(tmp_path / "export")
    class_pictures.bring(tmp_path, tmp_path / "export", 3)
    assert ClassPictures(tmp_path / "export").png(2) == ClassPictures(tmp_path).png(2)
