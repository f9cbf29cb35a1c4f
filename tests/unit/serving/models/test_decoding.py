"""Large pictures of strangers: a question has a bound, few are decoded at once, and small ones need not wait."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image

from geartrain.ams.values.errors import Busy, InvalidArgument
from geartrain.serving.models import decoding
from geartrain.serving.models.decoding import QuestionPictures
from geartrain.workers.data.bitmaps import Preprocessing

PHOTO = Preprocessing(kind="photo", size=16)
SECONDS = 30.0


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As small as pictures of tests."""
    monkeypatch.setattr(decoding, "MOST_PIXELS", 500)
    monkeypatch.setattr(decoding, "LARGE_PIXELS", 100)
    monkeypatch.setattr(decoding, "_places", threading.Semaphore(1))
    monkeypatch.setattr(decoding, "_turns", threading.Semaphore(1))
    return


def picture(side: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((side, side), 200, np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_the_pictures_of_a_question_have_a_bound_together() -> None:
    reading = QuestionPictures(PHOTO)
    for place in range(2):
        assert reading.bitmap(picture(15), f"images[{place}]").shape[-1] == 16
    with pytest.raises(InvalidArgument, match=r"up to images\[2\] have more than 500 pixels together"):
        reading.bitmap(picture(15), "images[2]")
    assert QuestionPictures(PHOTO).bitmap(picture(15), "images[0]").shape[-1] == 16  # another question's


def test_a_large_picture_that_finds_no_place_is_refused_and_a_small_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    scaled = Preprocessing.bitmap

    def slow(self: Preprocessing, decoded: Image.Image) -> np.ndarray:
        if decoded.width > 10:
            begun.set()
            assert may_end.wait(SECONDS)
        return scaled(self, decoded)

    monkeypatch.setattr(Preprocessing, "bitmap", slow)
    with ExitStack() as stack:
        first = threading.Thread(target=QuestionPictures(PHOTO).bitmap, args=(picture(12), "a"))
        stack.callback(first.join)
        stack.callback(may_end.set)
        first.start()
        assert begun.wait(SECONDS)
        with pytest.raises(Busy, match="ask again"):
            QuestionPictures(PHOTO).bitmap(picture(12), "b")
        assert QuestionPictures(PHOTO).bitmap(picture(8), "c").shape[-1] == 16
    assert QuestionPictures(PHOTO).bitmap(picture(12), "d").shape[-1] == 16, "a place was kept"


def test_a_damaged_large_picture_gives_its_place_back() -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="not a readable image"):
            QuestionPictures(PHOTO).bitmap(picture(12)[:-30], "a")
