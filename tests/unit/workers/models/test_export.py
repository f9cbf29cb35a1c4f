"""What an exported folder says of its model is true, and a folder that cannot be written stays as it was."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.data.images import ImageSet
from geartrain.workers.models import export, onnx_backbone
from geartrain.workers.models.export import RunImages, export_model, sure_from
from geartrain.workers.models.precision import PRECISIONS, Precision, require_precision
from geartrain.workers.models.saved_model import ClassNames, read_config
from geartrain.workers.models.trained_model import TrainedModel
from tests.support.served_models import NAMES, require_onnx, small_model


@pytest.fixture(autouse=True)
def needs_onnx() -> None:
    require_onnx()


def images(model: TrainedModel) -> RunImages:
    """Of which the model names three quarters rightly, and no two calls of a set are of one size."""
    generator = torch.Generator().manual_seed(1)
    bitmaps = torch.randint(0, 256, (300, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = model.best(model.embed(bitmaps), 1)[1][:, 0]
    labels[::4] = (labels[::4] + 1) % len(NAMES)
    whole = ImageSet(bitmaps, labels)
    return RunImages(held_out=[whole.subset(slice(0, 200)), whole.subset(slice(200, 300))], train=whole)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_precision_costs_is_measured_on_held_out_images(precision: Precision, tmp_path: Path) -> None:
    model = small_model()
    shown: list[tuple[str, int]] = []

    def track(items: Any, what: str, count: int) -> Any:
        shown.append((what, count))
        return items

    config = export_model(model, tmp_path / "m", images=images(model), precision=precision, track=track).config
    assert shown == [("Comparing on held-out images", 2)]
    written = read_config(tmp_path / "m")
    assert {name: written[name] for name in config} == config
    parity, accuracy = config["parity"], config["accuracy"]
    assert (config["precision"], parity["images"], parity["held_out"]) == (precision, 300, True)
    assert accuracy["images"] == 300 and accuracy["pytorch"] == accuracy["fp32"] == 0.75
    exported = gt.load_model(tmp_path / "m")
    bitmaps, labels = (torch.cat(part) for part in zip(*(one[:] for one in held_out_of(model)), strict=True))
    mine, theirs = model.embed(bitmaps), exported.embed(bitmaps)
    assert parity["max_error"] == pytest.approx(float((mine - theirs).abs().max()), rel=1e-3, abs=1e-6)
    named = exported.best(theirs, 1)[1][:, 0]
    assert accuracy[precision] == pytest.approx(float((named == labels).float().mean()))
    assert parity["same_top1"] == pytest.approx(float((named == model.best(mine, 1)[1][:, 0]).float().mean()))
    if precision == "fp32":
        assert parity["max_error"] < 1e-4 and parity["same_top1"] == 1
    else:
        assert parity["same_top1"] > 0.9
        export_model(model, tmp_path / "whole")
        sizes = [(tmp_path / name / "backbone.onnx").stat().st_size for name in ("m", "whole")]
        assert sizes[0] < 0.75 * sizes[1]


def test_an_answer_is_sure_from_the_lowest_score_from_which_enough_are_right() -> None:
    scores = np.linspace(1, 0, 200, dtype=np.float32)
    right = np.arange(200) < 95  # of the first hundred 95 are
    assert sure_from(scores, right) == {"score": float(scores[99]), "precision": 0.95, "share": 0.5, "images": 200}
    order = np.random.default_rng(0).permutation(200)
    assert sure_from(scores[order], right[order]) == sure_from(scores, right)
    equal = scores.copy()
    equal[90:120] = equal[90]  # these are sure together, or not at all
    found = sure_from(equal, right)
    assert found is not None and found["score"] == float(equal[89]) and found["precision"] == 1


def test_no_score_is_sure_where_too_few_images_are_right_from_it_on() -> None:
    scores = np.linspace(1, 0, 200, dtype=np.float32)
    assert sure_from(scores, np.arange(200) % 2 == 0) is None
    assert sure_from(scores, np.arange(200) < 40) is None


def test_a_model_with_held_out_images_says_from_which_score_it_is_sure(tmp_path: Path) -> None:
    model = small_model()
    assert "sure_from" not in export_model(model, tmp_path / "m", images=images(model)).config  # 75 % are right
    rightly = images(model)
    named = [model.best(model.embed(one.bitmaps), 1) for one in rightly.held_out if isinstance(one, ImageSet)]
    sets = [
        ImageSet(one.bitmaps, classes[:, 0])
        for one, (_, classes) in zip(rightly.held_out, named, strict=True)
        if isinstance(one, ImageSet)
    ]
    config = export_model(model, tmp_path / "m", images=RunImages(held_out=sets, train=rightly.train)).config
    least = min(float(scores.min()) for scores, _ in named)
    assert config["sure_from"] == {"score": pytest.approx(least, abs=1e-5), "precision": 1, "share": 1, "images": 300}


def test_features_that_differ_on_held_out_images_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    network = onnx_backbone.OnnxBackbone.forward

    def wrong_of_some(self: onnx_backbone.OnnxBackbone, *inputs: torch.Tensor) -> torch.Tensor:
        features = network(self, *inputs)
        return features * (1.01 if len(features) > 150 else 1)

    monkeypatch.setattr(onnx_backbone.OnnxBackbone, "forward", wrong_of_some)
    with pytest.raises(InvalidArgument, match=r"of 300 images, .* up to 0\.01 of their length .*; nothing was written"):
        export_model(model, tmp_path / "m", images=images(model))
    assert list(tmp_path.iterdir()) == []


def held_out_of(model: TrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bitmaps and labels of each set."""
    return [(one.bitmaps, one.labels) for one in images(model).held_out if isinstance(one, ImageSet)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_features_that_are_no_numbers_are_not_written(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of float16, where sums are beyond its range: of some images alone."""
    model = small_model()
    network = onnx_backbone.OnnxBackbone.forward

    def none_of_some(self: onnx_backbone.OnnxBackbone, *inputs: torch.Tensor) -> torch.Tensor:
        features = network(self, *inputs)
        return features * (torch.nan if len(features) > 150 else 1)

    monkeypatch.setattr(onnx_backbone.OnnxBackbone, "forward", none_of_some)
    with pytest.raises(InvalidArgument, match=r"features of onnxruntime are up to nan|that are not finite"):
        export_model(model, tmp_path / "m", images=images(model), precision=precision)
    assert list(tmp_path.iterdir()) == []


def test_a_network_whose_features_are_no_numbers_is_refused(tmp_path: Path) -> None:
    class Logarithm(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.log(images - 2.0)

    with pytest.raises(InvalidArgument, match="by nan of their length"):
        onnx_backbone.write_onnx(Logarithm(), torch.ones(3, 4), tmp_path / "network.onnx")


def test_without_images_int8_is_refused_and_the_comparison_is_on_random_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8 needs images of the run"):
        export_model(small_model(), tmp_path / "m", precision="int8")
    assert list(tmp_path.iterdir()) == []
    config = export_model(small_model(), tmp_path / "m").config
    assert config["parity"]["held_out"] is False and "accuracy" not in config
    with pytest.raises(ConfigError, match="'fp8'; it must be one of fp32, fp16, int8"):
        require_precision("fp8")


def test_centers_of_cosines_have_unit_length_and_begin_at_a_line_of_the_cache(tmp_path: Path) -> None:
    for is_cosine in (True, False):
        model = small_model(is_cosine=is_cosine, sub_centers=1 + is_cosine)
        export_model(model, tmp_path / "m")
        centers = load_file(tmp_path / "m" / "centers.safetensors")["centers"]
        lengths = np.linalg.norm(centers, axis=-1)
        assert np.allclose(lengths, 1, atol=1e-6) == is_cosine
        begin = int.from_bytes((tmp_path / "m" / "centers.safetensors").read_bytes()[:8], "little")
        assert (8 + begin) % 64 == 0


def test_versions_rise_by_themselves_or_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    versions = [
        export_model(small_model(), tmp_path / "m", version=said).config["version"] for said in (None, None, 7, None)
    ]
    assert versions == [1, 2, 7, 8]


def test_what_is_beside_the_model_is_sealed_with_it(tmp_path: Path) -> None:
    def finish(staging: Path, arrays: export.Arrays, features: Any) -> dict[str, Any]:
        (staging / "index.bin").write_bytes(b"index")
        return {"index": {"rows": len(arrays["centers"]), "queries": features.shape}}

    model = small_model()
    config = export_model(model, tmp_path / "m", images=images(model), finish=finish).config
    assert config["index"] == {"rows": len(NAMES), "queries": (300, 16)}
    assert "index.bin" in read_config(tmp_path / "m")["xxh3_128_of"]
    export_model(model, tmp_path / "m")  # it is part of the export, which is replaced as a whole
    assert not (tmp_path / "m" / "index.bin").exists()
    (tmp_path / "m" / "notes.txt").touch()
    with pytest.raises(InvalidArgument, match=r"holds other files \(notes.txt\)"):
        export_model(model, tmp_path / "m", version=3)


def test_the_folder_in_which_one_is_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"give a new name, as \./model"):
        export_model(small_model(), Path())


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(small_model(), tmp_path / "m", version=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "write_arrays", full)
    with pytest.raises(OSError, match="No space left"):
        export_model(small_model(seed=5), tmp_path / "m", version=2)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert gt.load_model(tmp_path / "m").class_names == NAMES and read_config(tmp_path / "m")["version"] == 1


def test_names_are_made_of_their_bytes_when_they_are_asked_for() -> None:
    for names in (NAMES, [], [""], ["\ud800", "a" * 1000]):
        mapped = ClassNames(**ClassNames.arrays(names))
        assert list(mapped) == names and len(mapped) == len(names)
    mapped = ClassNames(**ClassNames.arrays(NAMES))
    assert mapped[-1] == "h" and mapped[2:5] == NAMES[2:5]
    with pytest.raises(IndexError):
        mapped[len(NAMES)]
    assert list(itertools.islice(iter(mapped), 2)) == NAMES[:2]
