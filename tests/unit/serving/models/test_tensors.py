"""Models of tensors: what a request may bring, and who is told when the network refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.serving.answers import concatenated
from geartrain.serving.folder import load_folder
from geartrain.serving.http.callers import Limits
from geartrain.serving.models import own_code
from geartrain.serving.models.tensors import TensorModel
from geartrain.workers.models.trained_model import TrainedModel
from tests.support.http_service import served_models
from tests.support.served_models import require_onnx

D, NAMES = 8, ["a", "b", "c"]


class Reader(nn.Module):
    """Features of word numbers and a weight of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, D)

    def forward(self, words: Tensor, weight: Tensor) -> Tensor:
        """Words int64 [N, L] and weights [N] -> features [N, D]."""
        features: Tensor = self.words(words).sum(dim=1) * weight[:, None]
        return features


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    require_onnx()
    torch.manual_seed(0)
    return TrainedModel(backbone=Reader(), centers=torch.randn(3, D), class_names=NAMES, is_cosine=False)


EXAMPLE = {"words": torch.randint(0, 20, (4, 5)), "weight": torch.rand(4)}


@pytest.fixture(scope="module")
def model(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> TensorModel:
    folder = tmp_path_factory.mktemp("model")
    assert trained.export_onnx(folder, EXAMPLE).takes == "words int64 [N, any], weight float32 [N]"
    found = load_folder(folder)
    assert isinstance(found, TensorModel)
    return found


@pytest.mark.parametrize("length", [1, 3, 7])
def test_json_and_arrays_are_answered_as_the_model_predicts(
    model: TensorModel, trained: TrainedModel, length: int
) -> None:
    words, weight = torch.randint(0, 20, (2, length)), torch.tensor([0.5, -1.0])
    classify = model.operations["classify"]
    question = classify.read({"inputs": {"words": words.tolist(), "weight": weight.tolist()}, "k": 2})
    said = classify.write(classify.run(question))
    expected = trained.predict({"words": words, "weight": weight}, k=2)
    assert [[best["class"] for best in one] for one in said] == [[name for name, _ in one] for one in expected]
    arrays = {"words": words.numpy(), "weight": weight.numpy()}
    features = model.operations["embed"].run(model.operations["embed"].accept(arrays, {}))["features"]
    np.testing.assert_allclose(features, trained.embed({"words": words, "weight": weight}), rtol=1e-5, atol=1e-6)
    assert model.facts["inputs"] == {"words": ["int64", None, None], "weight": ["float32", None]}


def test_items_are_counted_whatever_lists_they_lie_in(model: TensorModel) -> None:
    items = {"words": [[1]] * 9, "weight": [1.0] * 9}
    with served_models({"texts": model}, Limits(max_items=8)) as served:
        said = served.refused(413, "POST", "/v1/embed", {"inputs": items})
    assert "the request has 9 items, the most is 8" in said


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs is None; give an object of 'words' int64 [N, any] and 'weight' float32 [N]"),
        ({"words": [[1]]}, "weight is None; give nested lists of float32"),
        ({"words": [[1]], "weight": [1], "mask": [1]}, "the inputs are 'words', 'weight', 'mask'; give 'words' int64"),
        ({"words": [[1], [1, 2]], "weight": [1, 1]}, "words has rows of several lengths; pad them to one"),
        ({"words": [[1.5]], "weight": [1]}, r"words is [[1.5]]; give nested lists of int64"),
        ({"words": [[True]], "weight": [1]}, r"words is [[True]]; give nested lists of int64"),
        ({"words": [1], "weight": [1]}, "'words' is int64 [1]; this model takes"),
        ({"words": [[]], "weight": [1]}, "words is [[]]; give nested lists of int64"),
        ({"words": [[1]], "weight": [1, 2]}, "the inputs have several numbers of items: 'words' 1, 'weight' 2"),
        ({"words": [[2**63]], "weight": [1]}, "words has a number that is no int64"),
        ({"words": [["x"]], "weight": [1]}, "give nested lists of int64"),
    ],
)
def test_what_the_network_does_not_take_is_refused_by_name(model: TensorModel, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        model.operations["classify"].read({"inputs": inputs})
    assert message in str(refused.value)


def test_a_value_that_the_network_refuses_is_the_askers_alone(model: TensorModel) -> None:
    embed = model.operations["embed"]
    good, bad = (embed.read({"inputs": {"words": [[word]], "weight": [1]}}) for word in (3, 99))
    assert good.parameters == bad.parameters  # answered together, until the batcher halves what fails
    with pytest.raises(InvalidArgument, match="the network refuses these inputs"):
        embed.run(concatenated([good, bad]))
    with pytest.raises(InvalidArgument, match="not finite"):
        embed.run(embed.read({"inputs": {"words": [[3]], "weight": [float("nan")]}}))
    assert np.isfinite(embed.run(good)["features"]).all()
    assert embed.read({"inputs": {"words": [[1, 2]], "weight": [1]}}).parameters != good.parameters


def test_an_export_of_before_and_code_that_was_not_named_say_what_to_do(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.export_onnx(tmp_path / "texts", EXAMPLE, preprocessing="own_words:tensors")
    with pytest.raises(ConfigError, match="geartrain serve --preprocessing own_words:tensors"):
        load_folder(tmp_path / "texts")
    monkeypatch.setattr(own_code, "_TRUSTED", {"own_words:tensors"})
    with pytest.raises(ConfigError, match=r"'own_words:tensors' cannot be imported: No module.*PYTHONPATH"):
        load_folder(tmp_path / "texts")
    (tmp_path / "own_words.py").write_text(
        "import numpy as np\n\ndef tensors(texts):\n    if texts == ['end']:\n        raise SystemExit(2)\n"
        "    if texts == ['ragged']:\n        return [[1], [2, 3]]\n"
        "    if texts == ['two']:\n        texts = texts * 2\n"
        "    return {'words': np.array([[len(text)] for text in texts]), 'weight': np.ones(len(texts), np.float32)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    classify = load_folder(tmp_path / "texts").operations["classify"]
    by_json = classify.read({"items": ["x", "four"]})
    by_grpc = classify.accept({"items": np.array([b"x", b"four"])}, {})
    np.testing.assert_array_equal(by_json.arrays["words"], [[1], [4]])
    np.testing.assert_array_equal(by_json.arrays["words"], by_grpc.arrays["words"])
    for items, message in (
        ([3], "the preprocessing refuses these items: TypeError"),
        (["end"], "the preprocessing refuses these items: SystemExit: 2"),
        (["ragged"], "the preprocessing refuses these items: ValueError"),
        (["two"], "made 2 rows of 1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            classify.read({"items": items})
    with pytest.raises(InvalidArgument, match=r"it is package\.module:function"):
        trained.export_onnx(tmp_path / "other", EXAMPLE, preprocessing="own_words")
