"""Distortions of images, and how ranks share them out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import geartrain as gt
from geartrain.workers.data.augment import Augmentation
from geartrain.workers.data.images import ImageSet


def test_distortion_is_a_function_of_seed_and_step_and_not_of_the_ranks() -> None:
    images = torch.rand(6, 1, 32, 32)
    distort = Augmentation().distort
    joint = distort(images, 0, 6, 1, 9)
    assert torch.equal(joint, distort(images, 0, 6, 1, 9))
    assert not torch.equal(joint, distort(images, 0, 6, 1, 10))
    halves = [distort(images[first : first + 3], first, 6, 1, 9) for first in (0, 3)]
    assert torch.equal(joint, torch.cat(halves))


def test_no_distortion_leaves_the_image_as_it_is() -> None:
    images = torch.rand(2, 3, 32, 32)
    still = Augmentation(affine=0, shift=0, elastic=0).distort(images, 0, 2, 0, 0)
    assert torch.allclose(still, images, atol=1e-4)


def test_colours_and_mirror_images_are_a_function_of_seed_and_step_too() -> None:
    images = torch.rand(64, 3, 16, 16)
    still = Augmentation(affine=0, shift=0, elastic=0)
    mirrored = replace(still, flip=0.5).distort(images, 0, 64, 1, 9)
    is_mirror = [torch.allclose(mirrored[i], images[i].flip(2), atol=1e-4) for i in range(64)]
    assert 16 < sum(is_mirror) < 48
    assert all(flipped or torch.allclose(mirrored[i], images[i], atol=1e-4) for i, flipped in enumerate(is_mirror))
    strong = replace(still, colour=0.2, flip=0.5)
    joint = strong.distort(images, 0, 64, 1, 9)
    assert float(joint.min()) >= 0 and float(joint.max()) <= 1
    assert float((joint.mean((1, 2, 3)) - images.mean((1, 2, 3))).std()) > 0.05
    halves = [strong.distort(images[first : first + 32], first, 64, 1, 9) for first in (0, 32)]
    torch.testing.assert_close(joint, torch.cat(halves))


def test_ranks_share_out_the_images() -> None:
    images = ImageSet(torch.zeros(7, 1, 32, 32, dtype=torch.uint8), torch.arange(7))
    parts = [images.part(rank, 2).labels.tolist() for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == list(range(7))


def test_batches_can_be_read_again() -> None:
    """A head whose sums do not fit into memory is imprinted all the same."""
    images = ImageSet(torch.zeros(5, 1, 32, 32, dtype=torch.uint8), torch.arange(5))
    batches = images.batches(2, torch.device("cpu"))
    for _ in range(2):
        assert [labels.tolist() for _, labels in batches] == [[0, 1], [2, 3], [4]]

    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "h", num_classes=20, dim=1024)
        assert head.imprint(batches, Scaled(), memory_bytes=1) == 0  # black pictures have no direction
        white = ImageSet(images.bitmaps + 255, images.labels).batches(2, torch.device("cpu"))
        assert head.imprint(white, Scaled(), memory_bytes=2 * 4 * 1024) == 5


class Scaled(nn.Module):
    """Bitmaps as features."""

    def forward(self, bitmaps: torch.Tensor) -> torch.Tensor:
        return bitmaps.float().flatten(1) / 255
