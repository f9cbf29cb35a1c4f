"""CIFAR-100 from its *binary* version, as its authors publish it: ``cifar-100-binary.tar.gz``, or what it unpacks to.

A record is 3,074 bytes: the coarse class, the fine class, then 32 x 32 pixels in red, green and blue planes, row by
row (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html). The "python version" holds pickles, which can run
code when read, and is refused.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.images import ImageSet

SIDE, CHANNELS = 32, 3
FINE_CLASSES, COARSE_CLASSES = 100, 20
_RECORD_BYTES = 2 + CHANNELS * SIDE * SIDE
_MAX_BYTES = 1 << 30
_FILES = ("train.bin", "test.bin", "fine_label_names.txt")


@dataclass(frozen=True)
class Cifar100:
    """Images [N, 3, 32, 32] with fine classes."""

    class_names: list[str]
    train: ImageSet
    test: ImageSet


def load_cifar100(path: Path) -> Cifar100:
    """Read the archive ``path``, or the folder that it unpacks to. 180 MB of memory for the full set.

    Raises InvalidArgument naming the file that is missing, damaged, or of the python version.
    """
    files = _members(path) if path.is_file() else _folder(path)
    missing = [name for name in _FILES if name not in files]
    if missing:
        raise InvalidArgument(f"{path} has no {', '.join(missing)}: give the 'binary version' of CIFAR-100")
    names = files["fine_label_names.txt"].decode("utf-8", errors="replace").split()
    if len(names) != FINE_CLASSES:
        raise InvalidArgument(f"fine_label_names.txt of {path} names {len(names)} classes; CIFAR-100 has 100")
    train, test = (_images(files[name], f"{name} of {path}") for name in _FILES[:2])
    return Cifar100(names, train, test)


def _folder(path: Path) -> Mapping[str, bytes]:
    if not path.is_dir():
        raise InvalidArgument(f"{path} does not exist; it must be cifar-100-binary.tar.gz or the folder inside it")
    folder = path / "cifar-100-binary" if (path / "cifar-100-binary").is_dir() else path
    _refuse_pickles(path, {file.name for file in folder.iterdir()})
    return {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}


def _members(path: Path) -> Mapping[str, bytes]:
    """The wanted files of the archive, read in memory: nothing is unpacked to where a name points."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                _refuse_pickles(path, {name})
                file = archive.extractfile(member) if member.isfile() and name in _FILES else None
                if file is None:
                    continue
                if not 0 <= member.size <= _MAX_BYTES:
                    raise InvalidArgument(f"{name} of {path} has {member.size:,} bytes, not 0 to {_MAX_BYTES:,}")
                found[name] = file.read()
                if len(found[name]) != member.size:
                    raise EOFError(f"{name} is cut")
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, zlib.error) as exc:
        if isinstance(exc, InvalidArgument):
            raise
        raise InvalidArgument(f"{path} is not a readable archive ({exc}): fetch it again") from exc
    return found


def _refuse_pickles(path: Path, names: set[str]) -> None:
    if names & {"meta", "train", "test"}:
        raise InvalidArgument(
            f"{path} is the 'python version' of CIFAR-100: pickles, which can run code when read. "
            "Give the 'binary version'"
        )


def _images(content: bytes, where: str) -> ImageSet:
    if not content or len(content) % _RECORD_BYTES:
        raise InvalidArgument(f"{where} has {len(content):,} bytes; it must be a multiple of {_RECORD_BYTES:,}")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    coarse, fine = records[:, 0], records[:, 1]
    bad = np.flatnonzero((coarse >= COARSE_CLASSES) | (fine >= FINE_CLASSES))
    if len(bad):
        row = int(bad[0])
        raise InvalidArgument(
            f"record {row} of {where} is of coarse class {coarse[row]} and fine class {fine[row]}; they must be below "
            f"{COARSE_CLASSES} and {FINE_CLASSES}"
        )
    bitmaps = records[:, 2:].reshape(-1, CHANNELS, SIDE, SIDE).copy()
    return ImageSet(torch.from_numpy(bitmaps), torch.from_numpy(fine.astype(np.int64)))
