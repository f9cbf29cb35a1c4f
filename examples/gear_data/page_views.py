"""Page views with pictures that recur: MovieLens users see glyph images as the advertisements of movies.

Semi-synthetic. Real: who rated which movie how, hence the users, the movies and how unevenly they recur. Made up, from
a seed: which glyphs advertise a movie, which of them a view shows, and what the look of a glyph adds to a rating. The
glyphs say nothing about the movies, so without that last part a picture would be no more than another name of its
movie, and nothing would be won by looking at it:

    appeal(image) = w · (ink of its 4 x 4 cells), w ~ N(0, 1)¹⁶, standardised over all images
    label = 1 if rating + appeal_stars · appeal(image) >= 3.5 else 0

``appeal_stars=0`` leaves the plain label: a rating of 4 or 5.

Legend: N views, B batch, I images, S side of an image.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gear_data.movielens import Ratings, load_ratings
from geartrain.ams.values.errors import InvalidArgument, SampleNotFound
from geartrain.workers.data.bitmaps import Bitmap
from geartrain.workers.recipes.glyphs import load_face

CELLS = 4
"""A picture's appeal is a function of the ink in 4 x 4 cells."""
MIN_PULL = 3.5
IMAGE_SIZE = 32


@dataclass(frozen=True)
class Views:
    """Page views; all [N]."""

    users: Tensor
    """int64, from 0."""
    movies: Tensor
    """int64, from 0."""
    images: Tensor
    """int64 ids of what was shown."""
    labels: Tensor
    """float32, 0 or 1."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, places: Tensor) -> Views:
        """The views at ``places``, an index of any kind."""
        return Views(self.users[places], self.movies[places], self.images[places], self.labels[places])

    def batches(self, size: int, *, seed: int, passes: int = 1) -> Iterator[Views]:
        """Batches of ``size`` in a new order for each pass over the data; what is left over of a pass is left out."""
        if not 1 <= size <= len(self):
            raise InvalidArgument(f"the batch size is {size!r}; it must lie in [1, {len(self)}], the number of views")
        for number in range(passes):
            order = torch.from_numpy(np.random.default_rng((seed, number)).permutation(len(self)))
            for start in range(0, len(self) - size + 1, size):
                yield self.rows(order[start : start + size])


@dataclass(frozen=True)
class PageViews:
    """Views to train on and to test on, and the pictures that they show."""

    train: Views
    test: Views
    pictures: Tensor
    """[I, 1, S, S] uint8; the image id is the row."""
    appeal: Tensor
    """[I] float32, mean 0 and variance 1: what a dense part has to learn."""
    num_users: int
    num_movies: int

    def picture(self, image_id: int) -> Tensor:
        """The sample of an image id: float32 [1, S, S] in [0, 1]. Raises SampleNotFound."""
        if not 0 <= image_id < len(self.pictures):
            raise SampleNotFound(f"there is no image {image_id}; the ids of images lie in [0, {len(self.pictures)})")
        return self.pictures[image_id].float() / 255


def load_page_views(
    cache: Path,
    console: Console | None = None,
    *,
    images_per_movie: int = 2,
    appeal_stars: float = 1.0,
    held_out: float = 0.2,
    seed: int = 0,
) -> PageViews:
    """The page views of MovieLens-100K and the glyphs of one font; the settings are :func:`make_page_views`'s.

    Fetches 30 MB into ``cache`` and draws the glyphs there, once. Raises ConfigError if they cannot be had.
    """
    console = console or Console(file=io.StringIO())
    ratings = load_ratings(cache, lambda line: console.print(line, highlight=False))
    return make_page_views(
        ratings,
        load_face(cache, IMAGE_SIZE, console).bitmaps,
        images_per_movie=images_per_movie,
        appeal_stars=appeal_stars,
        held_out=held_out,
        seed=seed,
    )


def make_page_views(
    ratings: Ratings,
    glyphs: Bitmap,
    *,
    images_per_movie: int = 2,
    appeal_stars: float = 1.0,
    held_out: float = 0.2,
    seed: int = 0,
) -> PageViews:
    """Show one of its movie's glyphs with every rating; a function of the arguments alone.

    Args:
        ratings: who rated what.
        glyphs: uint8 [G, S, S], ink bright; each advertises one movie at most.
        images_per_movie: glyphs of a movie; movie m has the ids from m · images_per_movie on.
        appeal_stars: stars that one standard deviation of appeal adds to a rating.
        held_out: part of the views, drawn at random, that is kept for testing.
        seed: of everything that is drawn.

    Raises InvalidArgument for a value out of range or if there are too few glyphs.
    """
    num_users, num_movies = int(ratings.users.max()) + 1, int(ratings.movies.max()) + 1
    num_images = num_movies * images_per_movie
    if images_per_movie < 1 or num_images > len(glyphs):
        raise InvalidArgument(
            f"images_per_movie is {images_per_movie!r}; it must be at least 1, and {num_movies:,} movies need no more "
            f"than the {len(glyphs):,} glyphs there are"
        )
    if not 0 < held_out < 1 or not appeal_stars >= 0:
        raise InvalidArgument(f"held_out {held_out!r} must lie in (0, 1), appeal_stars {appeal_stars!r} be at least 0")
    chosen, shown, split, weights = (np.random.default_rng((seed, part)) for part in range(4))
    pictures = glyphs[np.sort(chosen.permutation(len(glyphs))[:num_images])]
    pictures = pictures[chosen.permutation(num_images)]  # a mapped file is read in its order, then shuffled
    appeal = appeal_of(pictures, weights.standard_normal(CELLS * CELLS))
    images = ratings.movies * images_per_movie + shown.integers(images_per_movie, size=len(ratings))
    labels = ratings.stars + appeal_stars * appeal[images] >= MIN_PULL
    views = Views(
        torch.from_numpy(ratings.users),
        torch.from_numpy(ratings.movies),
        torch.from_numpy(images),
        torch.from_numpy(labels.astype(np.float32)),
    )
    order = torch.from_numpy(split.permutation(len(views)))
    kept = max(1, round(held_out * len(views)))
    return PageViews(
        train=views.rows(order[kept:]),
        test=views.rows(order[:kept]),
        pictures=torch.from_numpy(pictures).unsqueeze(1),
        appeal=torch.from_numpy(appeal.astype(np.float32)),
        num_users=num_users,
        num_movies=num_movies,
    )


def appeal_of(pictures: Bitmap, weights: np.ndarray) -> np.ndarray:
    """Return the part of a rating by pictures [I, S, S], float64 [I]: the standardised weighted ink of 4 x 4 cells."""
    count, size = len(pictures), pictures.shape[-1]
    if size % CELLS:
        raise InvalidArgument(f"the pictures are {size} pixels wide; their side must be a multiple of {CELLS}")
    cells = pictures.reshape(count, CELLS, size // CELLS, CELLS, size // CELLS).mean(axis=(2, 4)) / 255
    raw = (cells.reshape(count, -1) - cells.mean()) @ weights
    spread = float(raw.std())
    standard: np.ndarray = (raw - raw.mean()) / (spread if spread > 0 else 1.0)
    return standard
