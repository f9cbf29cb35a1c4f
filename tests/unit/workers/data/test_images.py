import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace
from geartrain.workers.data.augment import Augmentation
from geartrain.workers.data.images import ImageSet
from geartrain.workers.recipes.margins import margin_of
from geartrain.workers.recipes.recipe import Recipe


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
    still = Augmentation().changed("none")
    mirrored = still.changed("flip=0.5").distort(images, 0, 64, 1, 9)
    is_mirror = [torch.allclose(mirrored[i], images[i].flip(2), atol=1e-4) for i in range(64)]
    assert 16 < sum(is_mirror) < 48
    assert all(flipped or torch.allclose(mirrored[i], images[i], atol=1e-4) for i, flipped in enumerate(is_mirror))
    assert Augmentation().changed("none,flip=0.5") == still.changed("flip=0.5")
    assert Augmentation().changed("flip=0.5").affine == Augmentation().affine > 0
    strong = still.changed("colour=0.2,flip=0.5")
    joint = strong.distort(images, 0, 64, 1, 9)
    assert float(joint.min()) >= 0 and float(joint.max()) <= 1
    assert float((joint.mean((1, 2, 3)) - images.mean((1, 2, 3))).std()) > 0.05
    halves = [strong.distort(images[first : first + 32], first, 64, 1, 9) for first in (0, 32)]
    torch.testing.assert_close(joint, torch.cat(halves))


@pytest.mark.parametrize("text", ["blur=1", "flip", "flip=0.5,none", "flip=x", "flip=2", "flip=nan", ""])
def test_an_augmentation_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="flip"):
        Augmentation().changed(text)


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


def test_a_recipe_survives_json_and_refuses_nonsense() -> None:
    recipe = Recipe(steps=7, augmentation=Augmentation(elastic=0.2))
    assert Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(ConfigError, match="newer"):
        Recipe.from_json({**recipe.to_json(), "dropout": 0.1})
    with pytest.raises(ConfigError, match="sample_rate is 0"):
        Recipe(sample_rate=0)
    with pytest.raises(ConfigError, match="steps is 0"):
        Recipe(steps=0)
    with pytest.raises(InvalidArgument, match="elastic"):
        Augmentation(elastic=-1)


def test_a_recipe_of_before_margins_had_names_is_read() -> None:
    recipe = Recipe(margin="cosface:24.0,0.15")
    older = {**recipe.to_json(), "scale": 24.0, "margin": 0.15}
    assert Recipe.from_json(older) == recipe
    assert margin_of(recipe.margin) == CosFace(scale=24, margin=0.15)


def test_margins_have_names_and_numbers() -> None:
    assert margin_of("none") is None
    assert margin_of("arcface") == ArcFace()
    assert margin_of("cosface:32") == CosFace(scale=32)
    assert margin_of("arcface:16,0.3") == ArcFace(scale=16, margin=0.3)
    assert margin_of("combined:8,1,0.2,0.1") == CombinedMargin(scale=8, m1=1, m2=0.2, m3=0.1)
    for wrong in ("softmax", "none:3", "arcface:", "arcface:a", "arcface:1,2,3", "cosface:-1", "arcface:16,9"):
        with pytest.raises(ConfigError, match=wrong):
            Recipe(margin=wrong)


def test_the_rate_rises_then_falls_to_nothing() -> None:
    factors = [Recipe(warmup_steps=10).rate_factor(step, 100) for step in range(100)]
    assert factors[0] < 0.11
    assert max(factors) > 0.95
    assert factors[-1] < 0.001
    assert factors[20:] == sorted(factors[20:], reverse=True)
