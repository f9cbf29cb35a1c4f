"""A trained model as an object: from a worker's folder, from gt.save and from an ONNX export, with equal answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged, SpecMismatch
from geartrain.cli.main import build_app
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models import onnx_backbone
from geartrain.workers.models.trained_model import TrainedModel, save_model
from tests.support import heads
from tests.support.picture_models import picture_model

CLASSES, DIM = 7, 5


def typed(*arguments: object) -> Result:
    """What a command line gives."""
    line = [str(argument) for argument in arguments]
    return CliRunner().invoke(build_app(line), line)


def require_onnx() -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="needs pip install 'geartrain[onnx]'")


@pytest.fixture
def worker_model(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    model = picture_model(torch.randn(3, 16), ["a", "b", "漢"], Preprocessing(kind="photo", size=16))
    save_model(tmp_path / "run" / "model", model)
    return tmp_path / "run"


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 24), np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def backbone(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, DIM), nn.BatchNorm1d(DIM))


def saved(folder: Path, **settings: Any) -> tuple[Path, Tensor, Tensor, Tensor]:
    """A saved model, images, and what its head says of them."""
    with gt.local(num_shards=2) as cluster:
        model = nn.ModuleDict({"backbone": backbone(1)})
        settings = {"select": gt.FullSoftmax(), "num_classes": CLASSES, "dim": DIM, **settings}
        model["head"] = head = heads.make_head(cluster, "classes", **settings)
        rows = gt.RowOptimizer(head)
        images = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
        for _ in range(3):
            head(model["backbone"](images), torch.arange(6)).backward()
            rows.step()
            rows.zero_grad()
        head.retire_classes(torch.tensor([2]))
        gt.save(model, folder)
        model.eval()
        with torch.no_grad():
            return folder, images, *head.predict(model["backbone"](images), 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"margin": gt.ArcFace(16.0)},
        {"margin": gt.ArcFace(16.0), "sub_centers": 3},
        {"bias": True},
        {"dtype": "bfloat16", "optimizer": gt.SparseMomentum(0.5)},
    ],
    ids=["cosine", "sub-centers", "bias", "bfloat16"],
)
def test_a_saved_model_answers_as_its_head_did(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder, images, scores, classes = saved(tmp_path / "model", **settings)
    model = gt.load_model(folder, backbone=backbone(9), class_names=[f"class {number}" for number in range(CLASSES)])
    answers = model.predict(images, 3)
    assert [[name for name, _ in row] for row in answers] == [
        [f"class {item}" for item in row] for row in classes.tolist()
    ]
    np.testing.assert_allclose([[score for _, score in row] for row in answers], scores, rtol=1e-4, atol=1e-5)
    assert len(model.class_names) == CLASSES - 1  # one was retired
    assert len(model.predict(images, 100)[0]) == CLASSES - 1
    assert model.embed(images[:0]).shape == (0, DIM)


def test_pictures_are_named_as_the_command_names_them(worker_model: Path, pictures: list[Path]) -> None:
    model = gt.load_model(worker_model)
    answers = model.predict(pictures, 2)
    for item in (str(pictures[0]), Image.open(pictures[0])):  # sums of other batches are rounded otherwise
        torch.testing.assert_close(model.embed(item), model.embed(pictures)[:1])
    done = typed("predict", worker_model, *pictures, "-k", 2)
    assert done.exit_code == 0, done.output
    for row, line in zip(answers, done.output.splitlines(), strict=True):
        assert all(f"{score:.3f}" in line for _, score in row)


def test_images_are_embedded_in_eval_between_two_steps_of_a_training() -> None:
    backbone = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    model = TrainedModel(backbone=backbone, centers=torch.eye(4), class_names=list("abcd"))
    images = torch.rand(8, 4) + 5
    torch.testing.assert_close(model.embed(images), images / (1 + 1e-5) ** 0.5)  # no mean of these, nothing dropped
    assert backbone[0].running_mean.count_nonzero() == 0
    assert backbone.training


def test_several_centers_of_a_class_are_scored_by_the_nearest(worker_model: Path, pictures: list[Path]) -> None:
    model = gt.load_model(worker_model)
    several = torch.randn(3, 2, 16)
    save_model(worker_model / "model", replace(model, centers=several))
    test_pictures_are_named_as_the_command_names_them(worker_model, pictures)
    loaded = gt.load_model(worker_model)
    features = loaded.embed(pictures)
    cosines = [torch.cosine_similarity(features[:, None, :], several[:, k], dim=2) for k in range(2)]
    torch.testing.assert_close(loaded.scores(features), torch.maximum(*cosines))
    assert "3 classes, dim 16" in repr(loaded)


def test_an_export_answers_as_the_model_does(worker_model: Path, pictures: list[Path], tmp_path: Path) -> None:
    require_onnx()
    folder = tmp_path / "exported"
    done = typed("export", worker_model, folder, "--onnx")
    assert done.exit_code == 0, done.output
    assert "of their length from PyTorch's" in done.output
    model, exported = gt.load_model(worker_model), gt.load_model(folder)
    torch.testing.assert_close(exported.embed(pictures), model.embed(pictures))
    assert typed("predict", worker_model, *pictures).output == typed("predict", folder, *pictures).output != ""
    for path in folder.iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        with pytest.raises(ModelDamaged):
            gt.load_model(folder)
        path.write_bytes(whole)


@pytest.mark.parametrize("settings", [{"bias": True}, {"margin": gt.ArcFace(16.0), "sub_centers": 2}])
def test_a_model_of_tensors_is_exported_with_all_of_its_head(settings: dict[str, Any], tmp_path: Path) -> None:
    require_onnx()
    folder, images, _, _ = saved(tmp_path / "model", **settings)
    model = gt.load_model(folder, backbone=backbone(9))
    with pytest.raises(InvalidArgument, match=r"example is None"):
        model.export_onnx(tmp_path / "exported")
    parity = model.export_onnx(tmp_path / "exported", images)
    assert parity.largest_distance < 1e-5
    again = gt.load_model(tmp_path / "exported")
    assert again.class_names == model.class_names
    torch.testing.assert_close(again.scores(again.embed(images)), model.scores(model.embed(images)))


class Reading(nn.Module):
    """Takes letters and how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(9, DIM)

    def forward(self, letters: Tensor, counts: Tensor | None = None) -> Tensor:
        rows = self.letters(letters)
        return rows.sum(1) if counts is None else (rows * counts[..., None]).sum(1)


class Bags(nn.Module):
    """Takes one argument, which is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(9, DIM, mode="sum")

    def forward(self, texts: tuple[Tensor, Tensor]) -> Tensor:
        pieces, begins = texts
        return self.pieces(pieces, begins)  # type: ignore[no-any-return]


def reader(network: nn.Module, folder: Path) -> TrainedModel:
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "words", num_classes=CLASSES, dim=DIM)
        gt.save(nn.ModuleList([network, head]), folder)
    return gt.load_model(folder, backbone=type(network)())


def test_a_backbone_of_several_tensors_takes_them_as_its_arguments(tmp_path: Path) -> None:
    network = Reading()
    model = reader(network, tmp_path / "model")
    letters, counts = torch.randint(9, (300, 4)), torch.rand(300, 4)
    features = network(letters, counts)
    torch.testing.assert_close(model.embed((letters, counts)), features)
    torch.testing.assert_close(model.embed({"counts": counts, "letters": letters}), features)
    torch.testing.assert_close(model.embed((letters,)), network(letters))
    assert len(model.predict((letters, counts), k=2)) == 300
    for wrong in ((letters, counts, counts), {"letter": letters}):
        with pytest.raises(InvalidArgument, match="Reading does not take these inputs"):
            model.predict(wrong)
    bags = Bags()
    texts = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2])
    torch.testing.assert_close(reader(bags, tmp_path / "bags").embed((texts,)), bags(texts))
    with pytest.raises(InvalidArgument, match=r"\(argument,\) where the only one is a tuple"):
        model_of_bags = gt.load_model(tmp_path / "bags", backbone=Bags())
        model_of_bags.embed(texts)


def test_several_tensors_are_exported_by_name_for_texts_of_any_length(tmp_path: Path) -> None:
    require_onnx()
    model = reader(Reading(), tmp_path / "model")
    parity = model.export_onnx(tmp_path / "exported", (torch.randint(9, (3, 4)), torch.ones(3, 4, dtype=torch.int64)))
    assert parity.images == 10 and parity.largest_distance < 1e-5
    again = gt.load_model(tmp_path / "exported")
    letters, counts = torch.randint(9, (5, 7)), torch.randint(3, (5, 7))
    for inputs in ((letters, counts), {"counts": counts, "letters": letters}):
        torch.testing.assert_close(again.embed(inputs), model.embed(inputs))
    with pytest.raises(InvalidArgument, match="it takes letters, counts"):
        again.embed((letters,))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((torch.ones(3, 4, dtype=torch.int64), torch.ones(2, 4)), r"tensors of \[2, 3\] images"),
        ({"letters": [1, 2]}, r"example\['letters'\] is \[1, 2\]; it must be a tensor of 2 or more"),
        ([1, 2], r"example is \[1, 2\]; it must be a tensor of 2 or more"),
    ],
)
def test_an_example_is_tensors_of_one_size(example: Any, message: str, tmp_path: Path) -> None:
    require_onnx()
    with pytest.raises(InvalidArgument, match=message):
        onnx_backbone.write_onnx(Reading(), example, tmp_path / "backbone.onnx")


class Drawing(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images + torch.rand_like(images)


class Branching(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images if float(images.sum()) > 0 else -images


@pytest.mark.parametrize(
    ("network", "message"), [(Drawing(), "nothing was written"), (Branching(), "cannot be exported")]
)
def test_what_onnx_cannot_say_is_not_written(network: nn.Module, message: str, tmp_path: Path) -> None:
    require_onnx()
    with pytest.raises(InvalidArgument, match=message):
        model = TrainedModel(backbone=network, centers=torch.randn(2, 4), class_names=["a", "b"])
        model.export_onnx(tmp_path / "exported", torch.randn(3, 4))
    assert list(tmp_path.iterdir()) == []


def test_an_export_without_its_libraries_names_them(
    worker_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'geartrain\[onnx\]'"):
        gt.load_model(worker_model).export_onnx(tmp_path / "exported")


def test_an_export_takes_no_folder_of_anything_else(
    worker_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(_: nn.Module, __: Tensor, path: Path) -> onnx_backbone.Parity:
        path.write_bytes(b"network")
        return onnx_backbone.Parity(images=1, largest_distance=0.0)

    model = gt.load_model(worker_model)
    monkeypatch.setattr(onnx_backbone, "write_onnx", written)
    monkeypatch.setattr(onnx_backbone, "OnnxBackbone", lambda _: model.backbone)
    (tmp_path / "file").touch()
    for folder in (worker_model, tmp_path, tmp_path / "file"):
        with pytest.raises(InvalidArgument, match=r"new name|is a file"):
            model.export_onnx(folder)
    gt.load_model(worker_model)
    for _ in range(2):
        model.export_onnx(tmp_path / "exported")


def test_what_does_not_fit_is_said(worker_model: Path, tmp_path: Path) -> None:
    folder, images, _, _ = saved(tmp_path / "model")
    with pytest.raises(InvalidArgument, match=r"load_model\(path, backbone=MyBackbone\(\)\)"):
        gt.load_model(folder)
    with pytest.raises(SpecMismatch, match=r"weight \[3, 4\].*holds none such"):
        gt.load_model(folder, backbone=nn.Linear(4, 3))
    with pytest.raises(InvalidArgument, match=r"has the heads \['head'\]"):
        gt.load_model(folder, backbone=backbone(1), head="tail")
    with pytest.raises(InvalidArgument, match=r"2 names, by id; class 3 lives and has none: a dict may name some"):
        gt.load_model(folder, backbone=backbone(1), class_names=["a", "b"])
    with pytest.raises(InvalidArgument, match=r"8 names, by id; the head has 7 classes"):
        gt.load_model(folder, backbone=backbone(1), class_names=list("abcdefgh"))
    some = gt.load_model(folder, backbone=backbone(1), class_names={3: "three"})
    assert some.class_names[some.class_names.index("three") + 1] == "4"
    model = gt.load_model(folder, backbone=backbone(1))
    with pytest.raises(InvalidArgument, match="takes tensors"):
        model.predict("image.png")
    with pytest.raises(InvalidArgument, match="leave backbone="):
        gt.load_model(worker_model, backbone=backbone(1))
    with pytest.raises(ConfigError, match="does not exist"):
        gt.load_model(tmp_path / "nothing")
    refused = typed("predict", folder, "image.png")
    assert "geartrain.load_model" in str(refused.exception)
    assert images.shape == (6, 4)


@pytest.mark.parametrize("form", ["cosine", "sub-centers", "biases"])
def test_faiss_finds_the_classes_that_the_model_finds(form: str) -> None:
    pytest.importorskip("faiss", reason="needs pip install 'geartrain[serve]'")
    torch.manual_seed(0)
    model = TrainedModel(
        backbone=nn.Identity(),
        centers=torch.randn(30, 3, DIM) if form == "sub-centers" else torch.randn(30, DIM),
        biases=torch.randn(30) if form == "biases" else None,
        class_names=[str(place) for place in range(30)],
        is_cosine=form != "biases",
    )
    features = torch.randn(9, DIM)
    asked = torch.cat([features, torch.ones(9, 1)], dim=1) if form == "biases" else nn.functional.normalize(features)
    scores, classes = model.to_faiss().search(asked.numpy(), 1)
    expected_scores, expected = model.best(features, 1)
    assert classes.tolist() == expected.tolist()
    np.testing.assert_allclose(scores, expected_scores.numpy(), atol=1e-5)


def test_to_faiss_without_faiss_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    model = TrainedModel(backbone=nn.Identity(), centers=torch.randn(3, DIM), class_names=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"to_faiss needs a library: pip install 'geartrain\[serve\]'"):
        model.to_faiss()
