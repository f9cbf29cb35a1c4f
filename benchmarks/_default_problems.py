"""Four classification problems that need no download: pairs of letters, digits, misspelt words, few samples a class.

Each gives batches to train on and up to 20,000 samples held out, both functions of a seed, and a network.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 128
TEST = 20_000
SIDE = 20
BUCKETS, NGRAMS = 4096, 24
Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Inputs of the labels [N]."""


@dataclass(frozen=True)
class Problem:
    """Samples of one seed, the same for everyone who is compared, and the network before the last layer."""

    name: str
    num_classes: int
    dim: int
    batches: list[tuple[Tensor, Tensor]]
    """Of the training, a step each."""
    test: tuple[Tensor, Tensor]
    backbone: Callable[[], nn.Module]


def problems(seed: int, steps: int) -> list[Callable[[], Problem]]:
    """All four, made when they are asked for."""
    return [lambda make=make: make(seed, steps) for make in (_letters, _digits, _words, _few_samples)]  # type: ignore[misc]


def with_wrong_labels(problem: Problem, part: float, seed: int) -> Problem:
    """The same, but for a ``part`` of the labels of the training, which are drawn evenly from all classes each time."""
    generator = torch.Generator().manual_seed(3000 + seed)
    batches = []
    for inputs, labels in problem.batches:
        is_wrong = torch.rand(len(labels), generator=generator) < part
        drawn = torch.randint(problem.num_classes, labels.shape, generator=generator)
        batches.append((inputs, torch.where(is_wrong, drawn, labels)))
    return replace(problem, batches=batches)


def _letters(seed: int, steps: int) -> Problem:
    """Pairs of letters, turned and moved: 1,352 classes."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, string.ascii_letters)]
    return _pictures("pairs of letters", pairs, seed, steps, noise=0.1, strength=0.3, dim=64)


def _digits(seed: int, steps: int) -> Problem:
    return _pictures("digits", list(string.digits), seed, steps, noise=0.5, strength=1.0, dim=32)


def _pictures(
    name: str, texts: list[str], seed: int, steps: int, *, noise: float, strength: float, dim: int
) -> Problem:
    bitmaps_CS = torch.stack([_drawn(text) for text in texts])

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        images = _distorted(bitmaps_CS[labels], strength, generator)
        return (images + noise * torch.randn(images.shape, generator=generator)).flatten(1)

    return _problem(name, len(texts), dim, seed, steps, draw, lambda: _network(SIDE * SIDE, dim))


def _words(seed: int, steps: int) -> Problem:
    """Words by Zipf's law, of which one letter in five is wrong, missing or twice: hashed pieces of two and three."""
    num_classes, dim = 4000, 64
    words = _vocabulary(num_classes)
    frequency = 1.0 / (10 + torch.arange(num_classes))

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        random = np.random.default_rng(int(torch.randint(1 << 31, (1,), generator=generator)))
        return torch.from_numpy(np.stack([_pieces(_misspelt(words[label], random)) for label in labels.tolist()]))

    return _problem("misspelt words by Zipf", num_classes, dim, seed, steps, draw, lambda: _TextNetwork(dim), frequency)


def _few_samples(seed: int, steps: int) -> Problem:
    """2,000 classes of five training samples each, seen again and again."""
    num_classes, dim, width, each = 2000, 64, 32, 5
    generator = torch.Generator().manual_seed(7)
    centers_CW = torch.randn(num_classes, width, generator=generator)
    mixing_WW = torch.randn(width, width, generator=generator) / math.sqrt(width)

    def noisy(labels: Tensor, generator: torch.Generator) -> Tensor:
        noisy = centers_CW[labels] + 0.55 * torch.randn(len(labels), width, generator=generator)
        return torch.tanh(noisy @ mixing_WW) + 0.1 * noisy

    known = torch.Generator().manual_seed(1000 + seed)
    labels_N = torch.arange(num_classes).repeat_interleave(each)
    inputs_NW = noisy(labels_N, known)
    order = torch.cat(
        [torch.randperm(len(labels_N), generator=known) for _ in range(steps * BATCH // len(labels_N) + 1)]
    )
    batches = [(inputs_NW[part], labels_N[part]) for part in order.split(BATCH)[:steps]]
    held_out = torch.Generator().manual_seed(2000 + seed)
    labels = torch.randint(num_classes, (TEST,), generator=held_out)
    test = noisy(labels, held_out), labels
    return Problem("five samples a class", num_classes, dim, batches, test, lambda: _network(width, dim))


def _problem(
    name: str,
    num_classes: int,
    dim: int,
    seed: int,
    steps: int,
    draw: Draw,
    backbone: Callable[[], nn.Module],
    frequency: Tensor | None = None,
) -> Problem:
    """Every sample of it is drawn anew."""
    frequency = torch.ones(num_classes) if frequency is None else frequency
    sets = []
    for offset, count in ((1000, steps * BATCH), (2000, TEST)):
        generator = torch.Generator().manual_seed(offset + seed)
        labels = torch.multinomial(frequency, count, replacement=True, generator=generator)
        sets.append((draw(labels, generator), labels))
    (inputs, labels), test = sets
    batches = list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))
    return Problem(name, num_classes, dim, batches, test, backbone)


def _network(width: int, dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, dim))


class _TextNetwork(nn.Module):
    """Sum of the pieces' vectors, then a layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(BUCKETS, 96, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, dim))

    def forward(self, pieces: Tensor) -> Tensor:
        out: Tensor = self.layers(self.pieces(pieces) * 8)
        return out


def _drawn(text: str) -> Tensor:
    """[S, S], ink 1, by the font that comes with Pillow."""
    image = Image.new("L", (2 * SIDE, 2 * SIDE))
    font = _font(SIDE * 2 if len(text) == 1 else SIDE)
    ImageDraw.Draw(image).text((SIDE, SIDE), text, fill=255, font=font, anchor="mm")
    return F.avg_pool2d(torch.from_numpy(np.array(image, np.float32))[None] / 255, 2)[0]


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _distorted(images_NS: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Turned, sheared, scaled and moved a little, each in its own way."""
    num = len(images_NS)
    angle, shear, wide, high, x, y = (strength * (torch.rand(num, generator=generator) * 2 - 1) for _ in range(6))
    turn = 0.35 * angle
    rows = [
        torch.stack([turn.cos() * (1 + 0.15 * wide), -turn.sin() + 0.25 * shear, 0.15 * x], 1),
        torch.stack([turn.sin(), turn.cos() * (1 + 0.15 * high), 0.15 * y], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), [num, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(images_NS[:, None], grid, align_corners=False)[:, 0]


def _vocabulary(num: int) -> list[str]:
    """Words of syllables, short ones first, as in languages."""
    random = np.random.default_rng(5)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")]
    words: dict[str, None] = {}
    while len(words) < num:
        length = 2 + (len(words) > num // 20) + (random.random() < 0.3)
        words["".join(random.choice(syllables, length))] = None
    return list(words)


def _misspelt(word: str, random: np.random.Generator) -> str:
    letters = []
    for letter, draw in zip(word, random.random(len(word)), strict=True):
        if draw < 0.08:
            letters.append(string.ascii_lowercase[int(random.integers(26))])
        elif draw < 0.14:
            letters.append(letter * 2)
        elif draw >= 0.20:
            letters.append(letter)
    return f"^{''.join(letters)}$"


def _pieces(word: str) -> np.ndarray:
    """Buckets [NGRAMS] of its pairs and triples of letters; 0 fills up."""
    pieces = [word[start : start + width] for width in (2, 3) for start in range(len(word) - width + 1)]
    out = np.zeros(NGRAMS, np.int64)
    for place, piece in enumerate(pieces[:NGRAMS]):
        number = 0
        for letter in piece:
            number = number * 31 + ord(letter)
        out[place] = 1 + number * 2654435761 % (BUCKETS - 1)
    return out
