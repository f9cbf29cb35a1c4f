"""Picture models: classes, features, classes nearest to features, and whether two pictures show the same.

Pictures are decoded and checked in the request's thread, so that a broken one fails its own request alone; batches are
of bitmaps. Legend: N items, C classes, D width of a feature, k answers, K channels, S side.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Arrays, Question, TensorSpec
from geartrain.serving.index.distributed_index import PartsIndex, parts_in_use
from geartrain.serving.index.nearest import NearestIndex
from geartrain.serving.index.registry import open_index
from geartrain.serving.models.decoding import QuestionPictures
from geartrain.serving.models.networks import open_network, threads_of_batch
from geartrain.workers.classify.class_pictures import ClassPictures
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.saved_model import ONNX, read_files

Floats = npt.NDArray[np.float32]
DEFAULT_K, MAX_K = 5, 1000
_MEASURED = ("precision", "parity", "accuracy", "training", "sure_from", "verify", "part")
_PICTURE = {
    "type": "string",
    "format": "byte",
    "description": "An image file (PNG, JPEG, BMP, GIF, WEBP, TIFF, PPM) in base64.",
}
_CLASSES = {
    "type": "array",
    "description": "Best first.",
    "items": {
        "type": "object",
        "properties": {"class": {"type": "string"}, "id": {"type": "integer"}, "score": {"type": "number"}},
    },
}
_EXAMPLE = (  # a drawn T
    "iVBORw0KGgoAAAANSUhEUgAAABgAAAAYAQAAAADIDABVAAAAIElEQVR42mP8z8DAxICKGT4wsMPZ/x//R5cnhBmRzAQAbK4GATDcXAIA"
    "AAAASUVORK5CYII="
)


class ClassModel:
    """A network with an index of class centers. Immutable and thread-safe."""

    kind: str

    def __init__(self, folder: Path, config: Mapping[str, Any], *, threads: int | None = None) -> None:
        """Open the checked files of a folder; ``threads`` work on one batch, all cores by default.

        Raises ConfigError (the model has other inputs, or onnxruntime is not installed), ModelDamaged (also where
        network, preprocessing, centers and names are not of one model), InvalidArgument (a network that onnxruntime
        cannot run), and the errors of :class:`PartsIndex` where other services have the class rows.
        """
        files = read_files(folder, dict(config))
        self.version = int(config["version"])
        self.created = float(config["created"])
        self.names = files.class_names
        self.ids = files.tensors.get("ids")
        centers, threads = files.tensors["centers"], threads or threads_of_batch()
        self.dim, self.num_classes = int(centers.shape[-1]), len(self.names)
        self.is_cosine = bool(config["is_cosine"])
        self.index: NearestIndex | PartsIndex
        if (parts := parts_in_use()) is None:
            self.index = open_index(folder, config, centers, files.tensors.get("biases"), threads=threads)
        else:
            self.index = PartsIndex(parts, self.created, self.num_classes, self.ids)
        self._session = open_network(folder / ONNX, threads)
        made = self._session.get_outputs()[0].shape[-1]
        if isinstance(made, int) and made != self.dim:
            raise _of_several(
                folder, f"its network makes features of {made} numbers, and its class centers have {self.dim}"
            )
        if parts is None and len(centers) != self.num_classes:
            raise _of_several(folder, f"it has {len(centers):,} class centers and {self.num_classes:,} names")
        self.facts: Mapping[str, Any] = {
            "classes": self.num_classes,
            "dim": self.dim,
            "score": "cosine" if self.is_cosine else "product",
            "index": dict(self.index.facts),
            **{name: config[name] for name in _MEASURED if name in config},
        }

    def features(self, arrays: Arrays) -> Floats:
        """Return the features [N, D] of the network's inputs, by name."""
        if not len(next(iter(arrays.values()))):
            return np.empty((0, self.dim), np.float32)
        (features_ND,) = self._session.run(["features"], dict(arrays))
        return np.asarray(features_ND, np.float32)

    def k_of(self, given: Mapping[str, Any]) -> int:
        """Return the number of classes asked for. Raises InvalidArgument."""
        most = min(MAX_K, self.num_classes)
        k = given.get("k")
        return min(DEFAULT_K, most) if k is None else integer("k", k, 1, most)

    def close(self) -> None:
        """Do nothing: files stay mapped until the last answer."""


class PictureModel(ClassModel):
    """Picture model with onnxruntime and an index of class centers."""

    kind = "pictures"

    def __init__(self, folder: Path, config: Mapping[str, Any], *, threads: int | None = None) -> None:
        try:
            self.preprocessing = Preprocessing(**config["preprocessing"])
        except (ConfigError, TypeError) as exc:
            raise ConfigError(f"{folder} has another preprocessing than this version knows: {exc}") from exc
        super().__init__(folder, config, threads=threads)
        taken, size = self._session.get_inputs()[0].shape[1:], self.preprocessing.size
        made = [self.preprocessing.channels, size, size]
        if [one if isinstance(one, int) else of for one, of in zip(taken, made, strict=False)] != made:
            raise _of_several(folder, f"its preprocessing makes bitmaps of {made}, and its network takes {taken}")
        pictures = ClassPictures(folder)
        self.picture = pictures.png
        """PNG of a class by its id, or None."""
        self.operations = {
            operation.name: operation for operation in (Classify(self), Embed(self), Nearest(self), Verify(self))
        }
        self.facts = {**self.facts, "preprocessing": self.preprocessing.to_json(), "pictures": bool(pictures)}


class NamesClasses:
    """Operation that returns the best classes of each item."""

    name = "classify"
    outputs = (
        TensorSpec(name="ids", dtype="int64", shape=(None, None)),
        TensorSpec(name="scores", dtype="float32", shape=(None, None)),
        TensorSpec(name="classes", dtype="object", shape=(None, None)),
    )
    answer: Mapping[str, Any] = _CLASSES

    def __init__(self, model: ClassModel, features: Callable[[Arrays], Floats] | None = None) -> None:
        """``features`` returns [N, D] for a question; None: the network's."""
        self._names, self._ids, self._index = model.names, model.ids, model.index
        self._features = features or model.features

    def run(self, question: Question) -> Arrays:
        scores, places = self._index.search(self._features(question.arrays), dict(question.parameters)["k"])
        classes = np.array(self._names.several(places.ravel().tolist()), object)
        ids = places if self._ids is None else self._ids[places]
        return {"ids": ids, "scores": scores, "classes": classes.reshape(ids.shape)}

    def write(self, answered: Arrays) -> list[Any]:
        answers: list[Any] = []
        names, ids, scores = answered["classes"].tolist(), answered["ids"].tolist(), answered["scores"].tolist()
        for item in zip(names, ids, scores, strict=True):
            best = zip(*item, strict=True)
            answers.append([{"class": name, "id": label, "score": score} for name, label, score in best])
        return answers


class GivesFeatures:
    """Operation that returns the features of each item."""

    name = "embed"
    answer: Mapping[str, Any] = {"type": "array", "items": {"type": "number"}}

    def __init__(self, model: ClassModel) -> None:
        self._features = model.features
        self.outputs = (TensorSpec(name="features", dtype="float32", shape=(None, model.dim)),)

    def run(self, question: Question) -> Arrays:
        return {"features": self._features(question.arrays)}

    def write(self, answered: Arrays) -> list[Any]:
        features: list[Any] = answered["features"].tolist()
        return features


class _OfPictures:
    """Reads questions of one picture an item."""

    inputs: Sequence[TensorSpec] = (TensorSpec(name="images", dtype="object", shape=(None,)),)
    _model: PictureModel
    _ranks = False

    def read(self, body: Mapping[str, Any]) -> Question:
        pictures = []
        for place, text in enumerate(listed(fields_of(body, "images", *["k"] * self._ranks), "images")):
            pictures.append(_decoded(text, f"images[{place}]"))
        return self._question(pictures, body)

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        pictures = only(arrays, "images", 1, parameters, *["k"] * self._ranks)
        return self._question(pictures.tolist(), parameters)

    def _question(self, pictures: Sequence[bytes], given: Mapping[str, Any]) -> Question:
        parameters = (("k", self._model.k_of(given)),) if self._ranks else ()
        reading = QuestionPictures(self._model.preprocessing)
        bitmaps = [reading.bitmap(picture, f"images[{place}]") for place, picture in enumerate(pictures)]
        return Question(arrays={"images": np.stack(bitmaps)}, parameters=parameters)


class Classify(_OfPictures, NamesClasses):
    """Operation: classes of pictures."""

    help = "The classes that fit each picture best, with their scores."
    _ranks = True

    def __init__(self, model: PictureModel) -> None:
        super().__init__(model)
        self._model = model
        self.request = request_of({"images": _PICTURE}, [_EXAMPLE], model)


class Embed(_OfPictures, GivesFeatures):
    """Operation: features of pictures."""

    help = "The features of each picture, as the network gives them."

    def __init__(self, model: PictureModel) -> None:
        super().__init__(model)
        self._model = model
        self.request = request_of({"images": _PICTURE}, [_EXAMPLE], None)


class Nearest(NamesClasses):
    """Operation: classes of features."""

    name = "nearest"
    help = "The classes that are nearest to each feature, with their scores."

    def __init__(self, model: ClassModel) -> None:
        super().__init__(model, lambda arrays: arrays["features"])
        self._model = model
        self.inputs = (TensorSpec(name="features", dtype="float32", shape=(None, model.dim)),)
        feature = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": model.dim,
            "maxItems": model.dim,
            "description": "numbers as embed gives them",
        }
        self.request = request_of({"features": feature}, [[1.0] + [0.0] * (model.dim - 1)], model)

    def read(self, body: Mapping[str, Any]) -> Question:
        given = fields_of(body, "features", "k")
        said = listed(given, "features")
        try:
            features = np.array(said)
        except ValueError:  # lists of several lengths
            features = np.empty(0, object)
        if features.dtype.kind not in "fiu":
            raise InvalidArgument(f"features are {quoted(said)}; give a list of lists of {self._model.dim} numbers")
        return self._question(features, self._model.k_of(given))

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        features = only(arrays, "features", 2, parameters, "k")
        return self._question(features, self._model.k_of(parameters))

    def _question(self, features: npt.NDArray[Any], k: int) -> Question:
        if features.dtype.kind not in "fiu":
            raise InvalidArgument(f"features are of type {features.dtype}; give float32")
        if features.ndim != 2 or features.shape[1] != self._model.dim:
            raise InvalidArgument(
                f"features have shape {list(features.shape)}; this model takes [N, {self._model.dim}]"
            )
        with np.errstate(over="ignore"):  # infinity raises below
            features = np.asarray(features, np.float32)
        if not np.isfinite(features).all():
            raise InvalidArgument("features have a value that is not finite; give finite numbers")
        return Question(arrays={"features": features}, parameters=(("k", k),))


class Verify:
    """Operation: comparison of two pictures, such as of faces."""

    name = "verify"
    help = "How alike the two pictures of each pair are: the cosine of their features, 1 at most."
    inputs: Sequence[TensorSpec] = (TensorSpec(name="pairs", dtype="object", shape=(None, 2)),)
    outputs = (TensorSpec(name="scores", dtype="float32", shape=(None,)),)
    answer: Mapping[str, Any] = {
        "type": "object",
        "properties": {"score": {"type": "number"}, "same": {"type": "boolean"}, "threshold": {"type": "number"}},
        "required": ["score"],
    }

    def __init__(self, model: PictureModel) -> None:
        self._model = model
        pair = {"type": "array", "items": _PICTURE, "minItems": 2, "maxItems": 2}
        self.request = request_of({"pairs": pair}, [[_EXAMPLE, _EXAMPLE]], None)

    def read(self, body: Mapping[str, Any]) -> Question:
        pairs = listed(fields_of(body, "pairs"), "pairs")
        decoded = []
        for place, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2:
                raise InvalidArgument(f"pairs[{place}] is {quoted(pair)}; give a list of two pictures in base64")
            decoded.append([_decoded(text, f"pairs[{place}][{side}]") for side, text in enumerate(pair)])
        return self._question(decoded)

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        pairs = only(arrays, "pairs", 2, parameters)
        if pairs.shape[1] != 2:
            raise InvalidArgument(f"pairs have shape {list(pairs.shape)}; give [N, 2] pictures")
        return self._question(pairs.tolist())

    def _question(self, pairs: Sequence[Sequence[bytes]]) -> Question:
        reading = QuestionPictures(self._model.preprocessing)
        bitmaps = [
            [reading.bitmap(picture, f"pairs[{place}][{side}]") for side, picture in enumerate(pair)]
            for place, pair in enumerate(pairs)
        ]
        return Question(arrays={"bitmaps": np.array(bitmaps)})

    def run(self, question: Question) -> Arrays:
        bitmaps = question.arrays["bitmaps"]
        features = self._model.features({"images": bitmaps.reshape(-1, *bitmaps.shape[2:])})
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        first, second = (features / np.maximum(lengths, 1e-12)).reshape(len(bitmaps), 2, -1).transpose(1, 0, 2)
        return {"scores": (first * second).sum(axis=1)}

    def write(self, answered: Arrays) -> list[Any]:
        scores = answered["scores"].tolist()
        if (verify := self._model.facts.get("verify")) is None:
            return [{"score": score} for score in scores]
        threshold = verify["threshold"]
        return [{"score": score, "same": score >= threshold, "threshold": threshold} for score in scores]


def request_of(items: Mapping[str, Any], example: list[Any], ranked: ClassModel | None) -> dict[str, Any]:
    """Return the JSON schema of a body with a list of ``items``; with ``ranked`` also k."""
    ((name, item),) = items.items()
    properties: dict[str, Any] = {name: {"type": "array", "items": item, "minItems": 1}}
    body: dict[str, Any] = {name: example}
    if ranked is not None:
        most = min(MAX_K, ranked.num_classes)
        properties["k"] = {"type": "integer", "minimum": 1, "maximum": most, "default": min(DEFAULT_K, most)}
        body["k"] = min(3, most)
    return {
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
        "example": body,
    }


def fields_of(body: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    """Return ``body``. Raises InvalidArgument if it has other fields than ``known``."""
    for name in body:
        if name not in known:
            raise InvalidArgument(f"{quoted(name)} is not a field of this request; it takes {' and '.join(known)}")
    return body


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name)
    if not isinstance(found, list) or not found:
        raise InvalidArgument(f"{name} is {quoted(found)}; give a list with an item for each answer")
    return found


def _decoded(text: object, where: str) -> bytes:
    """Return the bytes of a picture in base64, also of a data URL. Raises InvalidArgument."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{where} is {quoted(text)}; give an image file in base64, a string")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidArgument(f"{where} is no base64 ({exc}); encode the bytes of an image file") from exc


def only(arrays: Arrays, name: str, ndim: int, parameters: Mapping[str, Any], *known: str) -> npt.NDArray[Any]:
    """Return the only array. Raises InvalidArgument unless it has this name, ``ndim`` dimensions and items."""
    fields_of(parameters, *known)
    if set(arrays) != {name}:
        raise InvalidArgument(f"the inputs are {', '.join(map(quoted, arrays)) or 'none'}; give {name!r} alone")
    found = arrays[name]
    if found.ndim != ndim or not len(found):
        raise InvalidArgument(f"{name} has shape {list(found.shape)}; give {ndim} dimensions and an item or more")
    return found


def _of_several(folder: Path, why: str) -> ModelDamaged:
    return ModelDamaged(f"{folder} is not of one model: {why}; export the model again")
