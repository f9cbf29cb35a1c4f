"""A small set of ratings in the files of MovieLens-100K: users like the films of their own parity."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from geartrain.ams.values.strings import hash_strings

WORDS = ("M", "F", "artist", "writer", "00", "Drama", "Comedy", "War")
"""All texts of the fields."""
WORD_OF = dict(zip(hash_strings(list(WORDS)).tolist(), WORDS, strict=True))
USERS, ITEMS, RATINGS = 12, 20, 600


def write_movielens(folder: Path) -> Path:
    """Write the three files; return the folder."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    users = [
        f"{user}\t{20 + user}\t{'MF'[user % 2]}\t{('artist', 'writer')[user % 2]}\t{user:05}" for user in range(USERS)
    ]
    items = [f"{item}\tFilm {item}\t{1980 + item}\t{('Drama', 'Comedy War')[item % 2]}" for item in range(1, ITEMS)]
    items.append(f"{ITEMS}\tFilm of no year\tV\t")
    ratings = []
    for number in range(RATINGS):
        user, item = int(rng.integers(USERS)), int(rng.integers(1, ITEMS + 1))
        rating = int(rng.integers(4, 6)) if (user + item) % 2 == 0 else int(rng.integers(1, 4))
        ratings.append(f"{user}\t{item}\t{rating}\t{880_000_000 + 7 * number % RATINGS}")
    heads = {
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float",
    }
    for ending, lines in {"user": users, "item": items, "inter": ratings}.items():
        (folder / f"ml-100k.{ending}").write_text("\n".join([heads[ending], *lines]) + "\n", encoding="utf-8")
    return folder
