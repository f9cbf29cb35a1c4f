"""A served model of pictures answers as the trained one does, and says what is wrong with a question."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.answers import concatenated
from geartrain.serving.folder import load_folder
from geartrain.serving.models.pictures import PictureModel
from tests.support.served_models import NAMES, exported, in_base64, picture, small_model

PICTURES = [picture(seed) for seed in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> PictureModel:
    model = load_folder(folder)
    assert isinstance(model, PictureModel)
    return model


def asked(model: PictureModel, operation: str, **body: object) -> list[Any]:
    """The JSON answers to a JSON body."""
    chosen = model.operations[operation]
    answers = chosen.write(chosen.run(chosen.read(json.loads(json.dumps(body)))))
    json.dumps(answers)
    return answers


@pytest.mark.parametrize(
    "settings", [{}, {"is_cosine": False}, {"sub_centers": 3}], ids=["cosines", "products", "sub-centers"]
)
def test_classes_are_those_that_the_trained_model_names(settings: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(**settings)
    served = load_folder(exported(tmp_path / "model", model))
    assert isinstance(served, PictureModel)
    given = model.predict([Image.open(io.BytesIO(item)) for item in PICTURES], 8)
    found = asked(served, "classify", images=[in_base64(item) for item in PICTURES], k=8)
    assert [[item["class"] for item in row] for row in found] == [[name for name, _ in row] for row in given]
    for row, expected in zip(found, given, strict=True):
        np.testing.assert_allclose(
            [item["score"] for item in row], [score for _, score in expected], rtol=1e-4, atol=1e-5
        )
        assert [NAMES[item["id"]] for item in row] == [item["class"] for item in row]
        alike = [item["id"] for item in row if item["id"] in (2, 7)]
        assert alike == [2, 7]  # equal scores: the lower class first


def test_features_are_those_of_the_trained_model_and_find_its_classes(served: PictureModel) -> None:
    pictures = [in_base64(item) for item in PICTURES]
    features = asked(served, "embed", images=pictures)
    mine = small_model().embed([Image.open(io.BytesIO(item)) for item in PICTURES])
    np.testing.assert_allclose(features, mine, rtol=1e-4, atol=1e-4)
    near = asked(served, "nearest", features=features, k=2)
    named = asked(served, "classify", images=pictures, k=2)
    assert [[item["id"] for item in row] for row in near] == [[item["id"] for item in row] for row in named]


def test_a_pair_is_as_alike_as_its_features(served: PictureModel) -> None:
    pairs = [[in_base64(PICTURES[0]), in_base64(PICTURES[0])], [in_base64(PICTURES[1]), in_base64(PICTURES[2])]]
    same, other = (answer["score"] for answer in asked(served, "verify", pairs=pairs))
    first, second = np.array(asked(served, "embed", images=pairs[1]))
    assert same == pytest.approx(1, abs=1e-5)
    assert other == pytest.approx(float(first @ second / np.linalg.norm(first) / np.linalg.norm(second)), abs=1e-5)


def test_questions_that_are_joined_are_answered_as_each_alone(served: PictureModel) -> None:
    chosen = served.operations["classify"]
    questions = [chosen.accept({"images": np.array([item], object)}, {"k": 3}) for item in PICTURES]
    together = chosen.run(concatenated(questions))
    for place, question in enumerate(questions):
        alone = chosen.run(question)
        assert set(alone) == {spec.name for spec in chosen.outputs}
        np.testing.assert_array_equal(alone["ids"][0], together["ids"][place])
        np.testing.assert_allclose(alone["scores"][0], together["scores"][place], rtol=1e-4, atol=1e-5)


def test_the_example_of_each_operation_can_be_asked(served: PictureModel) -> None:
    for name, operation in served.operations.items():
        assert len(asked(served, name, **operation.request["example"])) == 1


def test_pictures_of_other_kinds_and_data_urls_are_read(served: PictureModel) -> None:
    jpeg = picture(5, "JPEG")
    plain = asked(served, "embed", images=[in_base64(jpeg)])
    assert asked(served, "embed", images=["data:image/jpeg;base64," + in_base64(jpeg)]) == plain


@pytest.mark.parametrize(
    ("operation", "body", "message"),
    [
        ("classify", {}, "images is None; give a list"),
        ("classify", {"images": []}, r"images is \[\]; give a list"),
        ("classify", {"images": "abc"}, "give a list"),
        ("classify", {"images": ["?"]}, r"images\[0\] is no base64"),
        ("classify", {"images": [7]}, r"images\[0\] is 7; give an image file in base64"),
        ("classify", {"images": [in_base64(PICTURES[0]), in_base64(b"text")]}, r"images\[1\] is not a readable image"),
        ("classify", {"images": [in_base64(PICTURES[0][:60])]}, r"images\[0\] is not a readable image"),
        ("classify", {"images": [in_base64(PICTURES[0])], "k": 9}, "k is 9; it must be .* 8"),
        ("classify", {"images": [in_base64(PICTURES[0])], "k": True}, "k is True"),
        ("classify", {"images": [in_base64(PICTURES[0])], "n": 1}, "'n' is not a field of this request"),
        ("nearest", {"features": [[1.0] * 15]}, r"shape \[1, 15\]; this model takes \[N, 16\]"),
        ("nearest", {"features": [[1.0] * 15 + [float("nan")]]}, "not finite"),
        ("nearest", {"features": [[1.0] * 15 + [1e300]]}, "not finite"),
        ("nearest", {"features": [[1.0], [1.0, 2.0]]}, "lists of 16 numbers"),
        ("nearest", {"features": [["a"] * 16]}, "lists of 16 numbers"),
        ("nearest", {"features": [["1"] * 16]}, "lists of 16 numbers"),
        ("nearest", {"features": [[True] * 16]}, "lists of 16 numbers"),
        ("nearest", {"features": [[None] * 16]}, "lists of 16 numbers"),
        ("nearest", {"features": [{}]}, "lists of 16 numbers"),
        ("verify", {"pairs": [["?"]]}, r"pairs\[0\] is \['\?'\]; give a list of two pictures"),
        ("verify", {"pairs": [["?", "?"]]}, r"pairs\[0\]\[0\] is no base64"),
    ],
)
def test_what_is_wrong_with_a_question_is_said(
    served: PictureModel, operation: str, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        served.operations[operation].read(body)


@pytest.mark.parametrize(
    ("operation", "arrays", "parameters", "message"),
    [
        ("classify", {}, {}, "the inputs are none; give 'images' alone"),
        ("classify", {"images": np.array([b"a"], object), "x": np.zeros(1)}, {}, "give 'images' alone"),
        ("classify", {"images": np.array([[b"a"]], object)}, {}, r"shape \[1, 1\]; give 1 dimensions"),
        ("classify", {"images": np.array([1], object)}, {}, r"images\[0\] is 1"),
        ("classify", {"images": np.array([PICTURES[0]], object)}, {"n": 3}, "'n' is not a field"),
        ("nearest", {"features": np.zeros((0, 16), np.float32)}, {}, "give 2 dimensions and an item or more"),
        ("nearest", {"features": np.array([["a"] * 16])}, {}, "features are of type"),
        ("nearest", {"features": np.full((1, 16), 1e300)}, {}, "not finite"),
        ("verify", {"pairs": np.array([[b"a", b"b", b"c"]], object)}, {}, r"give \[N, 2\] pictures"),
    ],
)
def test_what_is_wrong_with_arrays_is_said(
    served: PictureModel, operation: str, arrays: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        served.operations[operation].accept(arrays, parameters)


def test_serving_needs_neither_torch_nor_a_model_of_its_own(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from geartrain.serving.folder import load_newest\n"
        f"_, model = load_newest(Path({str(folder)!r})); chosen = model.operations['classify']\n"
        "chosen.run(chosen.read(chosen.request['example'])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
