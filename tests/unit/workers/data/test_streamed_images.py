"""Images that do not fit into memory are decoded batch by batch."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import Bitmap, Preprocessing
from geartrain.workers.data.folder import load_folder
from geartrain.workers.data.images import ReadAhead, StreamedImages
from tests.support.face_files import encoded, write_records

QUIET = Console(file=io.StringIO())
LOOK = Preprocessing(kind="photo", size=128, channels=3)
EACH, CLASSES = 30, 4


def picture(label: int, number: int) -> bytes:
    return encoded(Image.new("RGB", (40, 30), (60 * label, number, 200)))


def packed(folder: Path) -> Path:
    folder.mkdir()
    labelled = [(label, picture(label, number)) for label in range(CLASSES) for number in range(EACH)]
    write_records(folder / "train.rec", labelled)
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every picture that is decoded."""
    count: list[int] = []
    bitmap = Preprocessing.bitmap

    def counting(self: Preprocessing, image: Image.Image) -> Bitmap:
        count.append(1)
        return bitmap(self, image)

    monkeypatch.setattr(Preprocessing, "bitmap", counting)
    return count


def test_streamed_images_are_those_in_memory_and_none_is_decoded_before_it_is_wanted(
    tmp_path: Path, decoded: list[int]
) -> None:
    data = packed(tmp_path / "data")
    held = load_folder(data, LOOK, held_out=0.2, seed=5, console=QUIET)
    whole = len(decoded)
    assert whole == CLASSES * EACH
    streamed = load_folder(data, LOOK, held_out=0.2, seed=5, console=QUIET, memory_bytes=1 << 20)
    assert len(decoded) == whole
    assert isinstance(streamed.train, StreamedImages) and len(streamed.train) == len(held.train)
    for part in ("train", "validation"):
        mine, expected = getattr(streamed, part), getattr(held, part)
        for (bitmaps, labels), (others, their) in zip(
            mine.part(1, 2).batches(7, torch.device("cpu")),
            expected.part(1, 2).batches(7, torch.device("cpu")),
            strict=True,
        ):
            assert torch.equal(bitmaps, others) and torch.equal(labels, their)


def test_only_two_batches_are_in_memory_at_a_time(tmp_path: Path) -> None:
    data = load_folder(packed(tmp_path / "d"), LOOK, held_out=0, seed=0, console=QUIET, memory_bytes=0)
    batch_bytes = 4 * 3 * 128 * 128
    tracemalloc.start()
    try:
        seen = sum(len(labels) for _, labels in data.train.batches(4, torch.device("cpu")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == CLASSES * EACH
    # The bitmaps of a batch are there twice while they are stacked; the whole would be thirty batches.
    assert peak < 8 * batch_bytes, (peak, batch_bytes)


def test_a_batch_is_read_while_the_one_before_is_worked_on(tmp_path: Path, decoded: list[int]) -> None:
    data = load_folder(packed(tmp_path / "d"), LOOK, held_out=0, seed=0, console=QUIET, memory_bytes=0)
    reader = ReadAhead(data.train, lambda number: torch.arange(5) + 5 * number)
    first, _ = reader.take(0)
    assert torch.equal(reader.take(1)[0], data.train.take(torch.arange(5, 10))[0])
    assert torch.equal(reader.take(0)[0], first)  # out of turn: read anew
    assert len(decoded) >= 20


def test_a_broken_picture_is_named_or_another_stands_in_for_it(tmp_path: Path) -> None:
    for number in range(EACH):
        for label in "ab":
            (tmp_path / label).mkdir(exist_ok=True)
            (tmp_path / label / f"{number:03}.png").write_bytes(picture(0, number))
    broken = sorted((tmp_path / "a").iterdir())
    broken[3].write_bytes(b"torn")

    def load(skip: bool) -> StreamedImages:
        found = load_folder(tmp_path, LOOK, held_out=0, seed=0, console=QUIET, memory_bytes=0, skip_unreadable=skip)
        assert isinstance(found.train, StreamedImages)
        return found.train

    strict, tolerant = load(False), load(True)
    with pytest.raises(InvalidArgument, match=rf"{broken[3].name}.*skip_unreadable"):
        strict.take(torch.arange(EACH))
    bitmaps, labels = tolerant.take(torch.arange(EACH))
    assert len(bitmaps) == len(labels) == EACH and set(labels.tolist()) == {0}
    assert len({bytes(np.asarray(bitmap)) for bitmap in bitmaps}) == EACH - 1


Made = Callable[[], Image.Image]
STRANGE: dict[str, Made] = {
    "grey": lambda: Image.new("L", (50, 20), 130),
    "rgba": lambda: Image.new("RGBA", (20, 50), (130, 130, 130, 255)),
    "palette": lambda: Image.new("RGB", (33, 47), (130, 130, 130)).quantize(8),
    "sixteen bits": lambda: Image.fromarray(np.full((31, 90), 130 * 257, np.uint16)),
    "one pixel": lambda: Image.new("RGB", (1, 1), (130, 130, 130)),
    "cmyk": lambda: Image.new("RGB", (40, 40), (130, 130, 130)).convert("CMYK"),
}


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [16, 112])
def test_pictures_of_any_size_and_colour_become_equal_bitmaps(fit: str, channels: int, size: int) -> None:
    look = Preprocessing(kind="photo", size=size, channels=channels, fit=fit)  # type: ignore[arg-type]
    for name, made in STRANGE.items():
        bitmap = look.bitmap(made())
        assert bitmap.shape == (channels, size, size) and bitmap.dtype == np.uint8, name
        middle = bitmap[:, size // 2, size // 2]
        assert np.abs(middle.astype(int) - 130).max() <= 1, name


def test_what_is_not_square_is_stretched_cropped_or_padded() -> None:
    wide = Image.new("RGB", (90, 30), (0, 0, 0))
    wide.paste((250, 250, 250), (30, 0, 60, 30))
    shares = {
        fit: float((Preprocessing(kind="photo", size=32, channels=3, fit=fit).bitmap(wide) > 125).mean())  # type: ignore[arg-type]
        for fit in ("stretch", "crop", "pad")
    }
    assert shares["crop"] == 1 and abs(shares["stretch"] - 1 / 3) < 0.05 and abs(shares["pad"] - 1 / 9) < 0.05
