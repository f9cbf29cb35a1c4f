"""Conversion of a picture to the backbone's bitmap, shared by training and prediction.

Two kinds: ``ink`` for characters, signs and drawings (cut to the ink and scaled, so that position and size do not
matter) and ``photo`` (the whole picture, scaled). Legend: H, W of a picture; S the side of a bitmap; K channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from geartrain.ams.values.errors import ConfigError, GeartrainError, InvalidArgument

Bitmap = npt.NDArray[np.uint8]
INK_THRESHOLD = 40
"""Brightness of 255 above which a pixel counts as ink, on a dark ground."""
MARGIN = 1
"""Pixels left free on each side of the ink."""
MIN_ASPECT = 0.5
"""Least ratio of the short side to the long one at which a flat or narrow shape is scaled."""
MAX_PIXELS = 16 << 20
"""Most pixels of a decoded picture; each takes up to 16 bytes. JPEGs up to 4 times as large are decoded at half
size."""
MAX_FILE_BYTES = 128 << 20
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Formats of these suffixes. Pillow goes by content: it would start Ghostscript for an EPS called cat.png."""

FITS: dict[str, Callable[[Image.Image, tuple[int, int]], Image.Image]] = {
    "stretch": partial(Image.Image.resize, resample=Image.Resampling.BILINEAR),
    "crop": partial(ImageOps.fit, method=Image.Resampling.BILINEAR),
    "pad": partial(ImageOps.pad, method=Image.Resampling.BILINEAR),
}
"""Ways to make a picture square."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Settings of the conversion of a picture to a bitmap."""

    kind: Literal["ink", "photo"] = "ink"
    """Relevant part of the picture."""
    size: int = 32
    """Side of the bitmap in pixels; a multiple of 8."""
    channels: Literal[1, 3] = 1
    """1: grey, 3: RGB; ``ink`` is always grey."""
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    """Way to make a ``photo`` square: ``stretch`` (each axis by itself), ``crop`` (its middle) or ``pad`` (black beside
    it)."""

    def __post_init__(self) -> None:
        if self.kind not in ("ink", "photo"):
            raise ConfigError(f"preprocessing is {self.kind!r}; it must be 'ink' or 'photo'")
        if self.size % 8 or not 16 <= self.size <= 512:
            raise ConfigError(f"image size is {self.size!r}; it must be a multiple of 8 from 16 to 512")
        if self.fit not in FITS:
            raise ConfigError(f"fit is {self.fit!r}; it must be one of {', '.join(FITS)}")
        if self.channels not in (1, 3) or (self.kind == "ink" and self.channels != 1):
            raise ConfigError(f"channels is {self.channels!r}; it must be 1 or 3, and 1 with 'ink'")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values, keyword arguments of the constructor."""
        return asdict(self)

    def bitmap(self, picture: Image.Image) -> Bitmap:
        """Return [K, S, S] uint8 of a picture in any mode. Raises InvalidArgument if ``ink`` finds none."""
        opaque = flatten(picture, keeps_range=self.kind == "photo")
        if self.kind == "photo":
            mode = "L" if self.channels == 1 else "RGB"
            scaled = FITS[self.fit](opaque.convert(mode), (self.size, self.size))
            array = np.asarray(scaled, dtype=np.uint8)
            return array[None] if self.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))
        cropped = crop_ink(bright_ink(np.asarray(opaque.convert("L"), dtype=np.uint8)), self.size)
        if cropped is None:
            raise InvalidArgument("the picture is blank: no ink stands out from its ground")
        return cropped[None]


def flatten(picture: Image.Image, *, keeps_range: bool = True) -> Image.Image:
    """Return the picture without transparency, as on white paper, in a mode of 8 bits.

    16-bit greys keep their shade, unless ``keeps_range`` is false. Other ranges are stretched to full contrast.
    """
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        colours = picture.convert("RGBA")
        paper = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(paper, colours).convert("RGB")
    if picture.mode.startswith("I;16") and keeps_range:  # else at full contrast, however few of its shades are used
        return Image.fromarray((np.asarray(picture).astype(np.uint16) / 257).round().astype(np.uint8))
    if picture.mode.startswith(("I", "F")):  # 32-bit greys, integers and floats, have no fixed range
        values = np.asarray(picture, dtype=np.float32)
        spread = max(float(values.max() - values.min()), 1e-6)
        return Image.fromarray(((values - values.min()) * (255.0 / spread)).astype(np.uint8))
    return picture


def bright_ink(grey_HW: Bitmap) -> Bitmap:
    """Return [H, W] with bright ink on a ground of 0, whichever was dark, at full contrast.

    The ground is the commoner shade of the picture's border.
    """
    border = np.concatenate([grey_HW[0], grey_HW[-1], grey_HW[:, 0], grey_HW[:, -1]])
    ground = int(np.median(border))
    distance = np.abs(grey_HW.astype(np.int16) - ground)
    strongest = int(distance.max())
    if strongest < INK_THRESHOLD:
        return np.zeros_like(grey_HW)
    return (distance * (255.0 / strongest)).astype(np.uint8)


def crop_ink(ink_HW: Bitmap, size: int) -> Bitmap | None:
    """Return [S, S]: the ink's bounding box scaled to the square, each axis by itself, centred; None without ink."""
    rows = np.flatnonzero(ink_HW.max(axis=1) > INK_THRESHOLD)
    columns = np.flatnonzero(ink_HW.max(axis=0) > INK_THRESHOLD)
    if not len(rows):
        return None
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = int(bottom - top), int(right - left)
    least = max(1, int(MIN_ASPECT * max(height, width)))
    inner = size - 2 * MARGIN
    new_height = max(1, round(inner * height / max(height, least)))
    new_width = max(1, round(inner * width / max(width, least)))
    box = Image.fromarray(ink_HW[top:bottom, left:right])
    out = np.zeros((size, size), np.uint8)
    y, x = (size - new_height) // 2, (size - new_width) // 2
    scaled = box.resize((new_width, new_height), Image.Resampling.BILINEAR)
    out[y : y + new_height, x : x + new_width] = np.asarray(scaled)
    return out


def open_picture(path: Path) -> Image.Image:
    """Return the decoded picture in ``path``. Raises InvalidArgument naming the file if it is none."""
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist; give an image file")
    return decode_picture(path, str(path))


def require_file_bytes(size: int, where: str) -> None:
    """Raise InvalidArgument unless a picture of ``size`` encoded bytes may be read."""
    if size > MAX_FILE_BYTES:
        raise InvalidArgument(f"{where} has {size:,} bytes, more than {MAX_FILE_BYTES:,}; scale it down")


def _too_large(found: str) -> InvalidArgument:
    return InvalidArgument(f"{found} {MAX_PIXELS:,} (a JPEG: {4 * MAX_PIXELS:,}); scale it down")


def decode_picture(source: Path | BytesIO, where: str, admit: Callable[[int], None] | None = None) -> Image.Image:
    """Return the decoded picture in a file or its bytes. Raises InvalidArgument naming it as ``where`` if it is none.

    ``admit`` is called with its number of pixels before any is decoded, and may raise.
    """
    try:
        require_file_bytes(source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes, where)
        with Image.open(source, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                picture.draft(None, (width // 2, height // 2))  # affects only a JPEG
            if picture.width * picture.height > MAX_PIXELS:
                raise _too_large(f"{where} has {width} x {height} pixels, more than")
            if admit is not None:
                admit(picture.width * picture.height)
            picture.load()
            return ImageOps.exif_transpose(picture)  # a copy; cameras store their orientation
    except Image.DecompressionBombError as exc:
        raise _too_large(f"{where} has far more pixels than") from exc
    except UnidentifiedImageError as exc:
        taken = ", ".join(FORMATS)
        raise InvalidArgument(f"{where} is not a readable image ({taken}); replace or remove it") from exc
    except GeartrainError:
        raise
    except (OSError, ValueError, SyntaxError) as exc:
        raise InvalidArgument(f"{where} is not a readable image ({exc}); replace or remove it") from exc
