"""Fonts of the quickstart: their list, download, and check against pinned hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data.packages import Say, download_packages, member_of, require_pinned, write_pinned

REQUIREMENTS = Path(__file__).with_name("fonts.txt")


@dataclass(frozen=True, kw_only=True)
class SystemFont:
    """File of a Debian package that replaces a face whose pip package is gone."""

    path: Path
    """Place where the package installs it."""
    index: int
    """Face within a collection."""
    package: str
    """Debian package, named in the remedy."""


@dataclass(frozen=True, kw_only=True)
class Face:
    """One font face: one image per class."""

    name: str
    """Unique, used in file names."""
    family: str
    """Design that faces share; a family is either for training or held out."""
    role: Literal["train", "held_out"]
    package: str
    """pip package that contains the font."""
    member: str
    """End of the font's path inside the package."""
    sha256: str
    """Hash of the font file."""
    megabytes: float
    """Size of the package's download, 10^6 bytes."""
    system: SystemFont | None = None
    """Replacement if the package is not available."""


@dataclass(frozen=True)
class FontFile:
    """A face found on this machine."""

    face: Face
    path: Path
    index: int
    sha256: str


_NOTO = Path("/usr/share/fonts/opentype/noto")


def _sans(weight: str, sha256: str, megabytes: float, extra: bool) -> Face:
    return Face(
        name=f"noto-sans-cjk-{weight.lower()}",
        family="Noto Sans CJK",
        role="train",
        package=f"cvttf-notosanscjk-{weight.lower()}",
        member=f"cvttf_NotoSansCJK_{weight}/NotoSansCJKtc-{weight}.otf",
        sha256=sha256,
        megabytes=megabytes,
        system=SystemFont(
            path=_NOTO / f"NotoSansCJK-{weight}.ttc",
            index=3,  # the collection's order is JP, KR, SC, TC
            package="fonts-noto-cjk-extra" if extra else "fonts-noto-cjk",
        ),
    )


def _simplified(style: str, sha256: str) -> Face:
    return Face(
        name=f"noto-{style.lower()}-sc",
        family=f"Noto {style} SC",
        role="train",
        package="pylopdf-fonts-zh-cn",
        member=f"pylopdf_fonts_zh_cn/Noto{style}SC-Regular.otf",
        sha256=sha256,
        megabytes=17.1,
        system=SystemFont(path=_NOTO / f"Noto{style}CJK-Regular.ttc", index=2, package="fonts-noto-cjk"),
    )


CLASSES_FACE = "noto-sans-cjk-regular"
"""Face whose characters are the classes."""

FACES: tuple[Face, ...] = (
    _sans("Light", "baf3e2718c919472af2b2c107d79d71abf4ce6fb2bd46e45f2e2b6acf686f83c", 26.5, extra=True),
    _sans("Regular", "f57e46120a3dd025ac993801981849622405d1359b32093b1f046490f7885711", 27.4, extra=False),
    _sans("Bold", "977833121efae44b1c2115282724383b3201bdc104064d7bb2c1c92da928aafc", 28.6, extra=False),
    _sans("Black", "203cf8985ba88adbe5e315f931ca61b9f053c5e5f358bf0c91576eb380597ac5", 28.2, extra=True),
    _simplified("Sans", "faa6c9df652116dde789d351359f3d7e5d2285a2b2a1f04a2d7244df706d5ea9"),
    _simplified("Serif", "e8f396decc1f0963a016a989c3d8852e863d1350996f573860a80767c83a1cd3"),
    Face(
        name="wqy-microhei",
        family="WenQuanYi Micro Hei",
        role="held_out",
        package="paperang-p2-fonts-cjk",
        member="paperang_p2_fonts_cjk/fonts/wqy-microhei.ttc",
        sha256="2420e8078af796b19a3f6ef13de527a1a91c1e7171eea115926c614ced1009b3",
        megabytes=2.3,
        system=SystemFont(
            path=Path("/usr/share/fonts/truetype/wqy/wqy-microhei.ttc"), index=0, package="fonts-wqy-microhei"
        ),
    ),
    Face(
        name="ipaex-gothic",
        family="IPAex Gothic",
        role="held_out",
        package="japanize-matplotlib",
        member="japanize_matplotlib/fonts/ipaexg.ttf",
        sha256="6726fb3c804e3fbc3ff5f45eddfd2fb1a858c2b1e03d3f1d8619bbca8d0a0ccd",
        megabytes=4.1,
        system=SystemFont(
            path=Path("/usr/share/fonts/opentype/ipaexfont-gothic/ipaexg.ttf"),
            index=0,
            package="fonts-ipaexfont-gothic",
        ),
    ),
)


def find_fonts(cache: Path, faces: Sequence[Face] = FACES, say: Say = print) -> list[FontFile]:
    """Return the files of all ``faces``: from ``cache``, else by pip, else Debian's.

    Raises ConfigError naming the missing package and how to get it, or a file that is not the pinned one.
    """
    folder = cache / "fonts"
    missing = [face for face in faces if not _cached(folder, face).exists()]
    if missing:
        _fetch(folder, missing, say)
    return [_find(folder, face, say) for face in faces]


def _cached(folder: Path, face: Face) -> Path:
    return folder / f"{face.name}{Path(face.member).suffix}"


def _find(folder: Path, face: Face, say: Say) -> FontFile:
    path = _cached(folder, face)
    if path.exists():
        require_pinned(path, path.read_bytes(), face.sha256)
        return FontFile(face, path, 0, face.sha256)
    system = face.system
    if system is not None and system.path.exists():
        say(f"{face.package} cannot be had; using {system.path} of Debian's {system.package} for {face.family}")
        return FontFile(face, system.path, system.index, hashlib.sha256(system.path.read_bytes()).hexdigest())
    remedy = f", or 'apt-get install {system.package}'" if system is not None else ""
    raise ConfigError(
        f"the font {face.family} ({face.name}) is neither in {folder} nor on this system: pip could not download "
        f"{face.package}. Check the network (PIP_ARGS reaches pip){remedy}, then run again"
    )


def _fetch(folder: Path, missing: Sequence[Face], say: Say) -> None:
    """Download the packages of ``missing`` faces and extract their fonts."""
    sizes = {face.package: face.megabytes for face in missing}
    say(f"Downloading {len(sizes)} font packages, {sum(sizes.values()):.0f} MB, to {folder}: {', '.join(sizes)}")
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    if not download_packages(list(sizes), REQUIREMENTS, packages, say):
        for package in sizes:  # a missing one must not fail the others
            download_packages([package], REQUIREMENTS, packages, say)
    for face in missing:
        _extract(packages, folder, face)
    for archive in packages.iterdir():
        archive.unlink()
    packages.rmdir()


def _extract(packages: Path, folder: Path, face: Face) -> None:
    """Extract a face's font from whichever archive contains it, if one does."""
    for archive in sorted(packages.iterdir()):
        content = member_of(archive, face.member)
        if content is not None:
            write_pinned(_cached(folder, face), content, face.sha256)
            return
