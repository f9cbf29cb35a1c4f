"""MovieLens-100K as click samples: a rating of 4 or more is a click.

The files are RecBole's: tab-separated, with ``name:type`` at the head of each column.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.images import ItemImages, poster
from geartrain.workers.ctr.samples.kinds import INTEGER, TEXT, FieldKind
from geartrain.workers.data.packages import Say, download_packages, member_of, require_pinned, write_pinned

REQUIREMENTS = Path(__file__).with_name("movielens.txt")
PACKAGE = "recbole"
CLICK_RATING = 4
RATINGS, USERS, ITEMS = "ml-100k.inter", "ml-100k.user", "ml-100k.item"
_SHA256 = {
    RATINGS: "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    USERS: "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    ITEMS: "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
_ZIP_DIGITS = 2
SCHEMA = SampleSchema(
    item=("item", "genres", "year"),
    user="user",
    crosses=(("occupation", "genres"),),
    kinds={
        **dict.fromkeys(("user", "item", "age"), FieldKind(item=INTEGER)),
        **dict.fromkeys(("gender", "occupation", "zip"), FieldKind(item=TEXT)),
        "genres": FieldKind(item=TEXT, is_list=True),
        "year": FieldKind(item=INTEGER, fill=PADDING),
    },
)

Lines = list[dict[str, str]]


def find_movielens(cache: Path, say: Say) -> Path:
    """Return the folder with the files of MovieLens-100K: ``cache``/movielens, filled by pip the first time.

    Raises ConfigError if pip cannot fetch them, or if a file is not the pinned one.
    """
    folder = cache / "movielens"
    if not all((folder / name).exists() for name in _SHA256):
        _fetch(folder, say)
    for name, expected in _SHA256.items():
        require_pinned(folder / name, (folder / name).read_bytes(), expected)
    return folder


def _fetch(folder: Path, say: Say) -> None:
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    say(f"Downloading MovieLens-100K (2 MB, inside the pip package {PACKAGE}) to {folder}")
    reasons: list[str] = []
    try:
        if not download_packages([PACKAGE], REQUIREMENTS, packages, reasons.append):
            raise ConfigError(
                f"MovieLens-100K is not in {folder}, and {'; '.join(reasons)}. Check the network (PIP_ARGS reaches "
                f"pip), or put {', '.join(_SHA256)} of {PACKAGE} there"
            )
        for name, expected in _SHA256.items():
            found = (member_of(archive, f"/{name}") for archive in sorted(packages.iterdir()))
            content = next((data for data in found if data is not None), b"")
            write_pinned(folder / name, content, expected)
    finally:
        shutil.rmtree(packages, ignore_errors=True)


def read_movielens(folder: Path) -> ClickSamples:
    """Read the three files in ``folder``: the ids of fields user, item, age, gender, occupation, zip, genres and year.

    Users, items, ages (years) and years are their own ids; texts are hashed. Raises ConfigError that names file, line
    and value of what is missing or invalid.
    """
    users, items, ratings = folder / USERS, folder / ITEMS, folder / RATINGS
    of_user = _read(users, ("user_id", "age", "gender", "occupation", "zip_code"))
    of_item = _read(items, ("item_id", "release_year", "class"))
    rated = _read(ratings, ("user_id", "item_id", "rating", "timestamp"))
    user, item = _ids(ratings, rated, "user_id"), _ids(ratings, rated, "item_id")
    user_at = _places(ratings, "user_id", user, users, _ids(users, of_user, "user_id"))
    item_at = _places(ratings, "item_id", item, items, _ids(items, of_item, "item_id"))
    years = [int(entry["release_year"]) if entry["release_year"].isdecimal() else PADDING for entry in of_item]
    fields = {
        "user": user,
        "item": item,
        "age": _ids(users, of_user, "age")[user_at],
        "gender": hash_strings([entry["gender"] for entry in of_user])[user_at],
        "occupation": hash_strings([entry["occupation"] for entry in of_user])[user_at],
        "zip": hash_strings([entry["zip_code"][:_ZIP_DIGITS] for entry in of_user])[user_at],
        "genres": _bags([entry["class"].split() for entry in of_item])[item_at],
        "year": np.array(years, np.int64)[item_at],
    }
    stars = _numbers(ratings, rated, "rating")
    return ClickSamples(
        fields=fields,
        clicks=(stars >= CLICK_RATING).astype(np.float32),
        times=_ids(ratings, rated, "timestamp"),
        schema=SCHEMA,
        outcomes=np.rint(2 * stars).astype(np.int64),  # there are halves in later sets
        images=_posters(_ids(items, of_item, "item_id"), of_item),
        words=_words(of_user, of_item),
        titles={
            item: f"{entry['movie_title']} ({entry['release_year']})" if entry["release_year"] else entry["movie_title"]
            for item, entry in zip(_ids(items, of_item, "item_id").tolist(), of_item, strict=True)
            if entry.get("movie_title")
        },
    )


def _words(of_user: Lines, of_item: Lines) -> dict[int, str]:
    words = {entry[name] for entry in of_user for name in ("gender", "occupation")}
    words |= {entry["zip_code"][:_ZIP_DIGITS] for entry in of_user}
    words |= {word for entry in of_item for word in entry["class"].split()}
    return dict(zip(hash_strings(sorted(words)).tolist(), sorted(words), strict=True))


def _posters(ids: Ids, films: Lines) -> ItemImages:
    pixels = [
        poster(entry["class"].split(), int(entry["release_year"]) if entry["release_year"].isdecimal() else None)
        for entry in films
    ]
    order = np.argsort(ids)
    return ItemImages(ids[order], np.stack(pixels)[order])


def _read(path: Path, columns: Sequence[str]) -> Lines:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
        raise ConfigError(f"{path} is not there; a folder of MovieLens holds {RATINGS}, {USERS} and {ITEMS}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is no text in UTF-8 (byte {exc.start}); give the file as RecBole has it") from exc
    lines = text.removesuffix("\n").split("\n")
    names = [column.partition(":")[0] for column in lines[0].split("\t")]
    if missing := [column for column in columns if column not in names]:
        raise ConfigError(f"{path} has no column {missing[0]!r}; its first line names {quoted(lines[0])}")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(names):
            raise ConfigError(f"{path}, line {number}: {len(cells)} columns, where the first line has {len(names)}")
        rows.append(dict(zip(names, cells, strict=True)))
    if not rows:
        raise ConfigError(f"{path} has no line after the first; it must hold some")
    return rows


def _numbers(path: Path, rows: Lines, column: str) -> npt.NDArray[np.float64]:
    found = []
    for number, row in enumerate(rows, 2):
        try:
            found.append(float(row[column]))
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise ConfigError(f"{path}, line {number}: {column} is {quoted(row[column])}; it must be a number")
    return np.array(found)


def _ids(path: Path, rows: Lines, column: str) -> Ids:
    for number, row in enumerate(rows, 2):
        text = row[column]
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise ConfigError(f"{path}, line {number}: {column} is {quoted(text)}; it must be an integer >= 0")
    return np.array([row[column] for row in rows]).astype(np.int64)


def _places(path: Path, column: str, wanted: Ids, source: Path, known: Ids) -> Ids:
    """Return the position of each of ``wanted`` among ``known``."""
    place_of: Mapping[int, int] = {entry: place for place, entry in enumerate(known.tolist())}
    found = np.array([place_of.get(entry, -1) for entry in wanted.tolist()], np.int64)
    if (found < 0).any():
        first = int(np.argmax(found < 0))
        raise ConfigError(f"{path}, line {first + 2}: {column} {wanted[first]} is not in {source}; add it there")
    return found


def _bags(words: Sequence[Sequence[str]]) -> Ids:
    """Return the ids of lists of words [N, longest], with padding."""
    bags = np.full((len(words), max(map(len, words), default=1) or 1), PADDING, np.int64)
    for place, some in enumerate(words):
        if some:
            bags[place, : len(some)] = hash_strings(list(some))
    return bags
