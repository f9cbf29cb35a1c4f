"""Six classification problems: pairs of letters, digits, misspelt words, few samples a class, icons, English words.

Each has training batches and up to 20,000 held-out samples, both functions of a seed, and a network. The first four
need only Geartrain, the last two the extra ``bench``: a font of icons, and a list of words.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.values.errors import ConfigError

BATCH = 128
TEST = 20_000
SIDE = 20
BUCKETS, NGRAMS = 4096, 24
FAMILY = 20
"""Classes of a family, in problems with families."""
Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Function that returns inputs for the labels [N]."""


@dataclass(frozen=True)
class Problem:
    """Samples of one seed, the same for all that are compared, and the network before the last layer."""

    name: str
    num_classes: int
    dim: int
    batches: list[tuple[Tensor, Tensor]]
    """Training batches, one a step."""
    test: tuple[Tensor, Tensor]
    backbone: Callable[[], nn.Module]


def problems(seed: int, steps: int) -> list[Callable[[], Problem]]:
    """Return makers of all six; the last two raise ConfigError without the extra ``bench``."""
    makers = (_letters, _digits, _words, _few_samples, _icons, _english)
    return [lambda make=make: make(seed, steps) for make in makers]  # type: ignore[misc]


def families(seed: int, steps: int) -> Iterator[Problem]:
    """Yield two problems of 4,000 classes in families of 20 similar ones; they need only Geartrain."""
    yield _vectors_of_families(seed, steps)
    yield _pictures_of_families(seed, steps)


def with_wrong_labels(problem: Problem, part: float, seed: int) -> Problem:
    """Return the problem with a ``part`` of its training labels replaced by labels drawn uniformly from all classes."""
    generator = torch.Generator().manual_seed(3000 + seed)
    batches = []
    for inputs, labels in problem.batches:
        is_wrong = torch.rand(len(labels), generator=generator) < part
        drawn = torch.randint(problem.num_classes, labels.shape, generator=generator)
        batches.append((inputs, torch.where(is_wrong, drawn, labels)))
    return replace(problem, batches=batches)


def of_head(problem: Problem, backbone: nn.Module, seed: int, *, imprint: bool = False, **settings: Any) -> float:
    """Train a head with these settings and the network before it; return its accuracy on the test."""
    with gt.local() as cluster:
        head = gt.ClassHead(
            cluster,
            "classes",
            num_classes=problem.num_classes,
            dim=problem.dim,
            config=gt.HeadConfig(seed=seed),
            **settings,
        )
        if imprint:
            head.imprint(problem.batches, backbone)
        network, rows = torch.optim.AdamW(backbone.parameters(), lr=1e-3), gt.RowOptimizer(head)
        for inputs, labels in problem.batches:
            head(backbone(inputs), labels).backward()
            network.step()
            rows.step()
            network.zero_grad()
            rows.zero_grad()
        return top1(problem, backbone, lambda features: head.predict(features, k=1)[1][:, 0])


@torch.no_grad()
def top1(problem: Problem, backbone: nn.Module, answers: Callable[[Tensor], Tensor]) -> float:
    """Return the share of the test whose class ``answers`` names from its features."""
    backbone.eval()
    inputs, labels = problem.test
    pairs = zip(inputs.split(1000), labels.split(1000), strict=True)
    right = sum(int((answers(backbone(some)) == their).sum()) for some, their in pairs)
    return right / len(labels)


def families_of_ten(seed: int, steps: int) -> Problem:
    """Return 4,000 classes, ten a family, whose distance is half of that between families."""
    num_classes, dim, width = 4000, 64, 32
    generator = torch.Generator().manual_seed(11)
    kin_FW = torch.randn(num_classes // 10, width, generator=generator)
    centers_CW = kin_FW.repeat_interleave(10, 0) + 0.5 * torch.randn(num_classes, width, generator=generator)
    mixing_WW = torch.randn(width, width, generator=generator) / math.sqrt(width)

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        noisy = centers_CW[labels] + 0.35 * torch.randn(len(labels), width, generator=generator)
        return torch.tanh(noisy @ mixing_WW) + 0.1 * noisy

    return _problem("families of ten", num_classes, dim, seed, steps, draw, lambda: _network(width, dim))


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
        return _spellings(words, labels, generator)

    return _problem("misspelt words by Zipf", num_classes, dim, seed, steps, draw, lambda: _TextNetwork(dim), frequency)


def _few_samples(seed: int, steps: int) -> Problem:
    """2,000 classes of five training samples each, seen again and again."""
    num_classes, dim, width = 2000, 64, 32
    generator = torch.Generator().manual_seed(7)
    centers_CW = torch.randn(num_classes, width, generator=generator)
    mixing_WW = torch.randn(width, width, generator=generator) / math.sqrt(width)

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        noisy = centers_CW[labels] + 0.55 * torch.randn(len(labels), width, generator=generator)
        return torch.tanh(noisy @ mixing_WW) + 0.1 * noisy

    def backbone() -> nn.Module:
        return _network(width, dim)

    return _repeated("five samples a class", num_classes, dim, seed, steps, draw, backbone, each=5)


def _vectors_of_families(seed: int, steps: int) -> Problem:
    """Noisy vectors, mixed; a class lies at less than half of its family's distance from others."""
    num_classes, dim, width = 4000, 64, 64
    generator = torch.Generator().manual_seed(7)
    families_FW = torch.randn(num_classes // FAMILY, width, generator=generator)
    centers_CW = families_FW.repeat_interleave(FAMILY, 0) + 0.4 * torch.randn(num_classes, width, generator=generator)
    mixing_WW = torch.randn(width, width, generator=generator) / math.sqrt(width)

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        noisy = centers_CW[labels] + 0.3 * torch.randn(len(labels), width, generator=generator)
        return torch.tanh(noisy @ mixing_WW) + 0.1 * noisy

    return _problem("vectors in families", num_classes, dim, seed, steps, draw, lambda: _network(width, dim))


def _pictures_of_families(seed: int, steps: int) -> Problem:
    """Two letters that are the family's, and a third one, turned and moved."""
    pairs = itertools.islice(itertools.product(string.ascii_lowercase, repeat=2), 200)
    texts = ["".join(pair) + third for pair in pairs for third in string.ascii_letters[:FAMILY]]
    return _pictures("letters in families", texts, seed, steps, noise=0.1, strength=0.2, dim=64)


def _icons(seed: int, steps: int) -> Problem:
    """2,500 glyphs of one font, turned, sheared, scaled and with noise: ten images of each."""
    bitmaps_CS = _icon_bitmaps(2500)
    dim = 64

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        parts = []  # in pieces: grids of all samples at once are three times as large as they are
        for some in labels.split(5000):
            images = _distorted(bitmaps_CS[some], 1.0, generator)
            parts.append((images + 0.3 * torch.randn(images.shape, generator=generator)).flatten(1))
        return torch.cat(parts)

    def backbone() -> nn.Module:
        return _ConvNetwork(dim)

    return _repeated("icons, ten images each", len(bitmaps_CS), dim, seed, steps, draw, backbone, each=10)


def _english(seed: int, steps: int) -> Problem:
    """3,000 frequent English words, of which two letters in five are wrong, missing or twice: ten spellings of each."""
    num_classes, dim = 3000, 64
    frequent = _extra("wordfreq").top_n_list("en", 20_000)
    words = [word for word in frequent if word.isascii() and word.isalpha() and len(word) >= 5][:num_classes]

    def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
        return _spellings(words, labels, generator, noise=0.4)

    return _repeated("English words, ten spellings", num_classes, dim, seed, steps, draw, lambda: _TextNetwork(dim), 10)


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


def _repeated(
    name: str,
    num_classes: int,
    dim: int,
    seed: int,
    steps: int,
    draw: Draw,
    backbone: Callable[[], nn.Module],
    each: int,
) -> Problem:
    """``each`` training samples of a class, seen again and again."""
    known = torch.Generator().manual_seed(1000 + seed)
    labels_N = torch.arange(num_classes).repeat_interleave(each)
    inputs_N = draw(labels_N, known)
    passes = steps * BATCH // len(labels_N) + 1
    order = torch.cat([torch.randperm(len(labels_N), generator=known) for _ in range(passes)])
    batches = [(inputs_N[part], labels_N[part]) for part in order.split(BATCH)[:steps]]
    held_out = torch.Generator().manual_seed(2000 + seed)
    labels = torch.randint(num_classes, (TEST,), generator=held_out)
    return Problem(name, num_classes, dim, batches, (draw(labels, held_out), labels), backbone)


def _network(width: int, dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, dim))


class _ConvNetwork(nn.Sequential):
    """Three convolutions, a layer, batch normalisation after each, of flat pictures."""

    def __init__(self, dim: int) -> None:
        widths = (1, 8, 16, 32)
        layers: list[nn.Module] = [nn.Unflatten(1, (1, SIDE, SIDE))]
        for width, wider in itertools.pairwise(widths):
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        side = math.ceil(SIDE / 2 ** (len(widths) - 1))
        super().__init__(*layers, nn.Flatten(), nn.Linear(widths[-1] * side * side, dim), nn.BatchNorm1d(dim))


class _TextNetwork(nn.Module):
    """Sum of the pieces' vectors, then a layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(BUCKETS, 96, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, dim))

    def forward(self, pieces: Tensor) -> Tensor:
        out: Tensor = self.layers(self.pieces(pieces) * 8)
        return out


def _drawn(text: str, font: Any = None) -> Tensor:
    """[S, S], ink 1, by ``font`` or the one that comes with Pillow."""
    image = Image.new("L", (2 * SIDE, 2 * SIDE))
    font = font or _font(SIDE * 2 if len(text) == 1 else SIDE)
    ImageDraw.Draw(image).text((SIDE, SIDE), text, fill=255, font=font, anchor="mm")
    return F.avg_pool2d(torch.from_numpy(np.array(image, np.float32))[None] / 255, 2)[0]


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@functools.cache
def _icon_bitmaps(num: int) -> Tensor:
    """[num, S, S]: that many different glyphs of Material Design Icons, from all over the font."""
    path = next(Path(_extra("fonticon_mdi7").__file__).parent.rglob("*.ttf"))
    characters = sorted(TTFont(path).getBestCmap())
    font, found = ImageFont.truetype(str(path), 2 * SIDE), {}
    for character in np.random.default_rng(5).permutation(characters):
        bitmap = _drawn(chr(character), font)
        found.setdefault(bitmap.numpy().tobytes(), bitmap)
        if len(found) == num:
            break
    return torch.stack(list(found.values()))


def _extra(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise ConfigError(f"bench defaults needs {package}, which is not installed; pip install '.[bench]'") from exc


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


def _spellings(words: list[str], labels: Tensor, generator: torch.Generator, noise: float = 0.2) -> Tensor:
    random = np.random.default_rng(int(torch.randint(1 << 31, (1,), generator=generator)))
    return torch.from_numpy(np.stack([_pieces(_misspelt(words[label], random, noise)) for label in labels.tolist()]))


def _misspelt(word: str, random: np.random.Generator, noise: float = 0.2) -> str:
    letters = []
    for letter, draw in zip(word, random.random(len(word)) * (0.2 / noise), strict=True):
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
