"""Page views: what is real in them, what is drawn, and that a seed draws the same again."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gear_data import movielens
from gear_data.movielens import Ratings, load_ratings, read_ratings
from gear_data.page_views import PageViews, appeal_of, make_page_views
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.values.errors import ConfigError, InvalidArgument, SampleNotFound

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
FILE = HEADER + "196\t242\t3\t881250949\n1\t2\t5\t0\n"


def ratings(count: int = 400, *, users: int = 12, movies: int = 9, seed: int = 0) -> Ratings:
    random = np.random.default_rng(seed)
    return Ratings(
        random.integers(users, size=count), random.integers(movies, size=count), random.integers(1, 6, size=count)
    )


def glyphs(count: int = 40, size: int = 8) -> np.ndarray:
    return np.random.default_rng(7).integers(256, size=(count, size, size), dtype=np.uint8)


def everything(views: PageViews) -> list[torch.Tensor]:
    parts = [views.train, views.test]
    return [
        views.pictures,
        views.appeal,
        *(getattr(p, n) for p in parts for n in ("users", "movies", "images", "labels")),
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), images_per_movie=st.integers(1, 4), stars=st.sampled_from([0.0, 0.5, 2.0]))
def test_the_label_is_the_documented_formula(seed: int, images_per_movie: int, stars: float) -> None:
    rated = ratings(seed=seed)
    views = make_page_views(rated, glyphs(), images_per_movie=images_per_movie, appeal_stars=stars, seed=seed)
    random = np.random.default_rng((seed, 2)).permutation(len(rated))
    held_out = len(views.test)
    for part, rows in ((views.test, random[:held_out]), (views.train, random[held_out:])):
        assert np.array_equal(part.users.numpy(), rated.users[rows])
        assert np.array_equal(part.movies.numpy(), rated.movies[rows])
        assert np.array_equal(part.images.numpy() // images_per_movie, rated.movies[rows])
        pull = rated.stars[rows] + stars * views.appeal.double().numpy()[part.images.numpy()]
        sure = np.abs(pull - 3.5) > 1e-4  # the appeal kept is float32
        assert np.array_equal(part.labels.numpy()[sure], (pull >= 3.5)[sure])


def test_without_appeal_a_label_is_a_rating_of_four_or_five() -> None:
    rated = ratings()
    views = make_page_views(rated, glyphs(), appeal_stars=0.0)
    assert float(torch.cat([views.train.labels, views.test.labels]).sum()) == (rated.stars >= 4).sum()


def test_a_seed_draws_the_same_again_and_another_one_does_not() -> None:
    first, again, other = (make_page_views(ratings(), glyphs(), seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(everything(first), everything(again), strict=True))
    assert not torch.equal(first.pictures, other.pictures)
    assert not torch.equal(first.test.users, other.test.users)


def test_the_appeal_is_standardised_and_a_function_of_the_picture() -> None:
    views = make_page_views(ratings(), glyphs(), images_per_movie=4)
    assert abs(float(views.appeal.mean())) < 1e-5
    assert abs(float(views.appeal.std(correction=0)) - 1) < 1e-5
    weights = np.arange(16.0)
    shown = glyphs(6)
    turned = shown[::-1].copy()
    assert np.allclose(appeal_of(turned, weights), appeal_of(shown, weights)[::-1])
    assert not np.allclose(appeal_of(shown[:, ::-1].copy(), weights), appeal_of(shown, weights))


def test_no_two_movies_share_a_glyph() -> None:
    pictures = make_page_views(ratings(), glyphs(), images_per_movie=4).pictures
    assert len(torch.unique(pictures.flatten(1), dim=0)) == len(pictures) == 36


def test_batches_are_new_orders_of_all_views() -> None:
    views = make_page_views(ratings(), glyphs()).train
    batches = list(views.batches(32, seed=1, passes=2))
    assert len(batches) == 2 * (len(views) // 32)
    again = list(views.batches(32, seed=1, passes=2))
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(batches[0].users, batches[len(batches) // 2].users)
    counts = sum(torch.bincount(batch.users, minlength=12) for batch in batches[: len(batches) // 2])
    left_out = torch.bincount(views.users, minlength=12) - counts
    assert int(left_out.min()) >= 0
    assert int(left_out.sum()) == len(views) % 32


def test_a_picture_is_what_the_slow_gear_is_given() -> None:
    views = make_page_views(ratings(), glyphs())
    assert torch.equal(views.picture(5), views.pictures[5].float() / 255)
    for wrong in (-1, len(views.pictures)):
        with pytest.raises(SampleNotFound, match=rf"no image {wrong}; .*\[0, 18\)"):
            views.picture(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images_per_movie": 5}, "images_per_movie is 5.*40 glyphs"),
        ({"images_per_movie": 0}, "images_per_movie is 0"),
        ({"held_out": 1.0}, r"held_out 1\.0"),
        ({"appeal_stars": float("nan")}, "appeal_stars nan"),
    ],
)
def test_settings_out_of_range_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_page_views(ratings(), glyphs(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="batch size is 0"):
        next(make_page_views(ratings(), glyphs()).train.batches(0, seed=0))


def test_ratings_are_read_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "ml.inter"
    path.write_text(FILE)
    found = read_ratings(path)
    assert found.users.tolist() == [195, 0]
    assert found.movies.tolist() == [241, 1]
    assert found.stars.tolist() == [3, 5]


@pytest.mark.parametrize(
    "content", ["", "x\n1\t2\t3\t4\n", HEADER, HEADER + "1\t2\n", HEADER + "0\t1\t3\t4\n", FILE + "1\ta\t3\t4\n"]
)
def test_a_damaged_file_of_ratings_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ml.inter"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"ml\.inter"):
        read_ratings(path)


def test_ratings_come_out_of_the_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(names: list[str], requirements: Path, folder: Path, _say: object) -> bool:
        asked.extend(names)
        assert "recbole==" in requirements.read_text() and "--hash=sha256:" in requirements.read_text()
        with zipfile.ZipFile(folder / "recbole-1.whl", "w") as wheel:
            wheel.writestr(f"recbole/{movielens.MEMBER}", FILE)
        return True

    monkeypatch.setattr(movielens, "download_packages", download)
    monkeypatch.setattr(movielens, "SHA256", movielens.hashlib.sha256(FILE.encode()).hexdigest())
    assert len(load_ratings(tmp_path, str)) == len(load_ratings(tmp_path, str)) == 2
    assert asked == ["recbole"]
    assert [path.name for path in (tmp_path / "movielens").iterdir()] == ["ml-100k.inter"]
    (tmp_path / "movielens" / "ml-100k.inter").write_text(FILE + "1\t1\t1\t1\n")
    with pytest.raises(ConfigError, match=r"not the pinned file.*remove it"):
        load_ratings(tmp_path, str)


def test_ratings_that_cannot_be_had_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movielens, "download_packages", lambda *_: False)
    with pytest.raises(ConfigError, match=r"could not download recbole.*PIP_ARGS.*ml-100k\.inter"):
        load_ratings(tmp_path, str)
