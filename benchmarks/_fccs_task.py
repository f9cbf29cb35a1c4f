"""The task of the bench of FCCS, and its trainings: characters of type designs that training does not see.

A class is a character that three faces have: one image to train on (Noto Sans CJK Regular), distorted anew whenever it
is seen, and those of the two held-out families, distorted three times each, to test on. Everything follows from a seed.

Legend: N images, B micro-batch, S side of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import geartrain as gt
from geartrain.workers.data.augment import Augmentation
from geartrain.workers.data.images import ImageSet
from geartrain.workers.recipes.fonts import CLASSES_FACE, FACES, find_fonts
from geartrain.workers.recipes.glyphs import assemble
from geartrain.workers.recipes.render import render_faces

CACHE = Path(".cache")
NUM_CLASSES, DIM = 2000, 128
DRAWN_SIDE, SIDE = 32, 16
MICRO_BATCH, MAX_BATCH = 64, 1024
WARMUP, INITIAL = 0.1, 0.5
"""Parts of the epochs: of the warm-up (of every way), and before the batch of FCCS grows."""
TRAIN_DISTORTION = Augmentation()
TEST_DISTORTION, TEST_COPIES = Augmentation(affine=0.04, shift=0.04, elastic=0.05), 3


@dataclass(frozen=True)
class GlyphTask:
    """Images of the same classes to train and to test on."""

    train: ImageSet
    test: ImageSet
    """Of both held-out families."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Made with the rate after the warm-up."""
    fccs: bool = False
    """Whether the batch grows."""
    decay: Callable[[float], float] = lambda _: 1.0
    """What the rate is multiplied by after a part of the training, if the batch does not grow."""


def glyph_task() -> GlyphTask:
    """:data:`NUM_CLASSES` of the characters that all three faces have, evenly spread."""
    console = Console(stderr=True)
    faces = [face for face in FACES if face.name == CLASSES_FACE or face.role == "held_out"]
    fonts = find_fonts(CACHE, faces, say=lambda line: console.print(line, highlight=False))
    data = assemble(render_faces(fonts, CACHE, DRAWN_SIDE, console), None)
    tests = list(data.held_out.values())
    seen = torch.stack([torch.bincount(test.labels, minlength=len(data.class_names)) for test in tests])
    complete = (seen > 0).all(dim=0).nonzero()[:, 0]
    classes = complete[torch.arange(NUM_CLASSES) * len(complete) // NUM_CLASSES]
    held_out = ImageSet(torch.cat([test.bitmaps for test in tests]), torch.cat([test.labels for test in tests]))
    return GlyphTask(_of_classes(data.train, classes), _distorted(_of_classes(held_out, classes)))


def begin_process(task: GlyphTask) -> None:
    """Of a pool: keep the data, and one core."""
    torch.set_num_threads(1)
    _task.append(task)


def train(job: tuple[str, int, int]) -> float:
    """:func:`accuracy` of (way, epochs, seed), in a process of the pool."""
    name, epochs, seed = job
    return accuracy(_task[0], WAYS[name], epochs, seed)


def accuracy(task: GlyphTask, way: Way, epochs: int, seed: int) -> float:
    """Train for so many epochs; per cent of the test images whose class has the largest logit then."""
    model, loader = network(seed), DistortedGlyphs(task.train, seed)
    train = _with_fccs if way.fccs else _with_scheduler
    train(model, loader, way, epochs)
    return _top1(model, task.test)


class DistortedGlyphs:
    """Micro-batches of the training images, in another order each epoch, distorted; the last few may be left out."""

    batch_size = MICRO_BATCH

    def __init__(self, images: ImageSet, seed: int) -> None:
        self._images = images
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._images) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the distortions of the coming pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        order = torch.randperm(len(self._images), generator=generator)
        for number in range(len(self)):
            bitmaps, labels = self._images.take(order[number * self.batch_size : (number + 1) * self.batch_size])
            step = self._epoch * len(self) + number
            yield TRAIN_DISTORTION.distort(bitmaps.float() / 255, 0, len(labels), self._seed, step), labels


def network(seed: int) -> nn.Module:
    """Images [B, 1, S, S] float -> logits; its initial weights follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.AvgPool2d(DRAWN_SIDE // SIDE),
            *_block(1, 16, stride=1),
            *_block(16, 32, stride=2),
            *_block(32, 64, stride=2),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 4) ** 2, DIM, bias=False),
            # Without weights: LARS decays none of norms, and nobody is to win by the length of features.
            nn.BatchNorm1d(DIM, affine=False),
            nn.Linear(DIM, NUM_CLASSES),
        )


def sgd(lr: float, weight_decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """SGD with Nesterov momentum; as under LARS, biases and weights of norms do not decay."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = [param for param in model.parameters() if param.ndim > 1]
        others = [param for param in model.parameters() if param.ndim == 1]
        groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": weight_decay}, {"params": others}]
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)

    return make


def lars(lr: float, weight_decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """LARS, as in the paper. With its coefficient one rate is right for layers and, by plain SGD, for the others."""
    return lambda model: gt.LARS(model.parameters(), lr, weight_decay=weight_decay, trust_coefficient=0.02)


def adam(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Adam, as the paper has it."""
    return lambda model: torch.optim.Adam(model.parameters(), lr)


def steps_at(*parts: float, factor: float = 0.1) -> Callable[[float], float]:
    """The rate is multiplied by ``factor`` at each of ``parts`` of the training."""
    return lambda done: factor ** sum(done >= part for part in parts)


def cosine(done: float) -> float:
    """The rate falls along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * done))


FCCS, CONSTANT, ADAM = "FCCS", "without batch policy", "Adam"
PIECEWISE, LARS, FIFTHS, COSINE = "piecewise", "piecewise of LARS", "piecewise by fifths", "cosine"
WAYS = {
    FCCS: Way(optimizer=lars(0.6, 2e-3), fccs=True),
    CONSTANT: Way(optimizer=lars(0.6, 2e-3)),
    PIECEWISE: Way(optimizer=sgd(0.2, 2e-3), decay=steps_at(0.6, 0.85)),
    LARS: Way(optimizer=lars(0.6, 2e-3), decay=steps_at(0.6, 0.85)),
    FIFTHS: Way(optimizer=sgd(0.2, 2e-3), decay=steps_at(0.6, 0.85, factor=0.2)),
    COSINE: Way(optimizer=sgd(0.2, 2e-3), decay=cosine),
    ADAM: Way(optimizer=adam(1e-3)),
}
"""By name."""
_task: list[GlyphTask] = []
"""Of a process that trains."""


def _with_fccs(model: nn.Module, loader: DistortedGlyphs, way: Way, epochs: int) -> None:
    optimizer = way.optimizer(model)
    schedule = gt.FCCS.for_epochs(
        optimizer,
        epochs=epochs,
        samples_per_epoch=len(loader) * MICRO_BATCH,
        warmup_epochs=WARMUP * epochs,
        initial_epochs=INITIAL * epochs,
        initial_batch=MICRO_BATCH,
        max_batch=MAX_BATCH,
        micro_batch=MICRO_BATCH,
    )
    for step in schedule.steps(loader):
        for images, labels in step:
            torch.autograd.backward(F.cross_entropy(model(images), labels) / len(step))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _with_scheduler(model: nn.Module, loader: DistortedGlyphs, way: Way, epochs: int) -> None:
    """The same warm-up, and a constant batch."""
    optimizer, total = way.optimizer(model), epochs * len(loader)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (WARMUP * total)) * way.decay(step / total))
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            torch.autograd.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


@torch.no_grad()
def _top1(model: nn.Module, images: ImageSet) -> float:
    model.eval()
    pairs = zip(torch.split(images.bitmaps, 1000), torch.split(images.labels, 1000), strict=True)
    right = sum(int((model(bitmaps.float() / 255).argmax(dim=1) == labels).sum()) for bitmaps, labels in pairs)
    return 100 * right / len(images)


def _block(inputs: int, outputs: int, *, stride: int) -> Iterable[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _of_classes(images: ImageSet, classes: Tensor) -> ImageSet:
    """The images of ``classes``, which are rising; their labels are the places there."""
    places = torch.searchsorted(classes, images.labels).clamp(max=len(classes) - 1)
    known = classes[places] == images.labels
    return ImageSet(images.bitmaps[known], places[known])


def _distorted(images: ImageSet) -> ImageSet:
    """Several copies of each, each distorted in its own way, the same for everyone."""
    bright = images.bitmaps.float() / 255
    copies = [TEST_DISTORTION.distort(bright, 0, len(images), 0, copy) for copy in range(TEST_COPIES)]
    return ImageSet((255 * torch.cat(copies)).byte(), images.labels.repeat(TEST_COPIES))
