import pytest
import torch
from torch.nn import functional

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data.images import ImageSet
from geartrain.workers.devices import choose_device
from geartrain.workers.models import discriminants
from geartrain.workers.models.backbones import StrokeNet, build_backbone
from geartrain.workers.models.discriminants import fit_projection


def noisy_set(num_classes: int, each: int, *, seed: int = 0, noise: float = 60.0) -> ImageSet:
    """Smooth random patterns, one per class, under noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = functional.interpolate(torch.rand(num_classes, 1, 8, 8, generator=generator) * 255, size=32)
    images = patterns.repeat(each, 1, 1, 1)
    images = images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed + each))
    return ImageSet(images.clamp(0, 255).to(torch.uint8), torch.arange(num_classes).repeat(each))


def nearest_mean_accuracy(net: StrokeNet, train: ImageSet, test: ImageSet, num_classes: int) -> float:
    with torch.no_grad():
        means = torch.zeros(num_classes, net.projection.out_features)
        means.index_add_(0, train.labels, net(train.bitmaps))
        scores = functional.normalize(net(test.bitmaps), dim=1) @ functional.normalize(means, dim=1).T
    return float((scores.argmax(1) == test.labels).float().mean())


@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 32), (1, 64), (3, 96)])
def test_features_have_the_width_asked_for(channels: int, size: int) -> None:
    net = StrokeNet(channels=channels, image_size=size, dim=24, width=8)
    images = torch.randint(0, 255, (5, channels, size, size), dtype=torch.uint8)
    features = net(images)
    assert features.shape == (5, 24)
    assert torch.allclose(features, net(images.float() / 255), atol=1e-6)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    net = StrokeNet(dim=16, width=8)
    images = torch.rand(6, 1, 32, 32)
    assert torch.allclose(net(images)[2:3], net(images[2:3]), atol=1e-5)


def test_the_stem_tells_directions_apart() -> None:
    net = StrokeNet(dim=16, width=8)
    bars = torch.zeros(2, 1, 32, 32)
    bars[0, 0, 15:17, :] = 1
    bars[1, 0, :, 15:17] = 1
    maps = net.stem(bars)[:, :, 3, 3]
    assert maps[0, 2] > 3 * maps[0, 0]
    assert maps[1, 0] > 3 * maps[1, 2]


def test_the_solved_projection_separates_classes_better_than_a_random_one() -> None:
    train, test = noisy_set(200, 4, noise=150), noisy_set(200, 3, noise=220)
    torch.manual_seed(0)
    net = StrokeNet(dim=32, width=8)
    before = nearest_mean_accuracy(net, train, test, 200)
    fit_projection(net, train.batches(64, torch.device("cpu")), 200)
    after = nearest_mean_accuracy(net, train, test, 200)
    assert after > before + 0.05


@pytest.mark.parametrize(("num_classes", "each"), [(2, 3), (5, 1), (40, 1)])
def test_few_classes_or_one_image_each_still_give_finite_useful_features(num_classes: int, each: int) -> None:
    train = noisy_set(num_classes, each)
    net = StrokeNet(dim=32, width=8)
    fit_projection(net, train.batches(64, torch.device("cpu")), num_classes)
    assert bool(torch.isfinite(net.projection.weight).all())
    assert nearest_mean_accuracy(net, train, noisy_set(num_classes, 4), num_classes) > 0.8


@pytest.mark.parametrize(("num_classes", "each", "dim"), [(12, 4, 5), (3, 4, 8), (30, 1, 40)])
def test_few_classes_give_the_directions_that_many_would(
    num_classes: int, each: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for with_shortcut in (True, False):
        torch.manual_seed(0)
        net = StrokeNet(dim=dim, width=8)
        if not with_shortcut:
            monkeypatch.setattr(discriminants, "_of_few_classes", lambda *_: None)
        fit_projection(net, noisy_set(num_classes, each).batches(64, torch.device("cpu")), num_classes)
        found.append(net.projection.weight.detach().double())
    shortcut, whole = (weight.T @ weight for weight in found)  # whatever the signs
    torch.testing.assert_close(shortcut, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


def test_a_class_without_images_does_not_spoil_the_fit() -> None:
    train = noisy_set(4, 5)
    net = StrokeNet(dim=16, width=8)
    fit_projection(net, train.batches(7, torch.device("cpu")), 9)
    assert bool(torch.isfinite(net.projection.weight).all())


def test_unknown_backbones_and_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="stroke_net"):
        build_backbone("resnet_1000", {})
    with pytest.raises(ConfigError, match="height"):
        build_backbone("stroke_net", {"height": 3})
    with pytest.raises(ConfigError, match="cannot be used"):
        choose_device("quantum")
    assert choose_device("cpu") == torch.device("cpu")
