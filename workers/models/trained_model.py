"""``gt.load_model``: a trained model that embeds, predicts and is exported, without cluster and training code.

Legend: N images, C classes, D width of a feature, k answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from geartrain.ams.client.factory import local
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.arguments import integer, path_name
from geartrain.ams.values.errors import ConfigError, InvalidArgument, InvalidRows, SpecMismatch
from geartrain.ams.values.text import counted, quoted
from geartrain.bridge.checkpoint.folder import MODEL, ModelRecord, read_record, read_state
from geartrain.bridge.checkpoint.rank_rows import DividedRows
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.imprinting.backbone import Inputs, moved, run
from geartrain.bridge.head.loss.sub_centers import scores_of_classes
from geartrain.bridge.head.weights import write_centers
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.data.bitmaps import Preprocessing, open_picture
from geartrain.workers.models import onnx_backbone
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.export import export_model
from geartrain.workers.models.saved_model import BACKBONE, CENTERS, ONNX, seal_model, unseal_model, write_arrays

ImageInputs = Inputs | str | Path | Image.Image | Iterable[str | Path | Image.Image]
AT_ONCE = 256
_ROWS_AT_ONCE = 65_536
_CENTERS = "centers"
"""Name of the tensor in the file of that name."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A backbone with the class centers of its head, on the CPU. :func:`load_model` makes it.

    The backbone is in eval() while it processes images; its mode is restored afterwards, so a model can also be used
    between two training steps. To use a GPU, move the backbone, ``model.backbone.to("cuda")``: images are moved there.
    """

    backbone: nn.Module
    """Backbone from images [N, …] to features [N, D]."""
    centers: Tensor
    """[C, D] float32; [C, K, D] of a head with K ``sub_centers``: a class's score is that of its best center."""
    biases: Tensor | None = None
    """[C] float32, of a head with ``bias=True``."""
    class_names: list[str]
    is_cosine: bool = True
    """Whether a class's score is the cosine of feature and center, as under a margin; otherwise the dot product."""
    preprocessing: Preprocessing | None = None
    """Settings for the conversion of pictures to tensors; None: the model takes only tensors."""
    backbone_name: str = "stroke_net"
    """Name of a worker's backbone, as in :func:`geartrain.workers.models.backbones.build_backbone`."""
    backbone_settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""
    training: dict[str, Any] = field(default_factory=dict)
    """Entry of the run that wrote it, as plain values; :mod:`geartrain.workers.classify.best` makes it."""

    def __repr__(self) -> str:
        """Return the model's facts, without its tensors and names."""
        classes, width = len(self.centers), self.centers.shape[-1]
        takes = "tensors" if self.preprocessing is None else "pictures"
        return f"TrainedModel({type(self.backbone).__name__} of {takes}, {classes} classes, dim {width})"

    @torch.no_grad()
    def embed(self, images: ImageInputs) -> Tensor:
        """Return features [N, D] float32 of images, on the host.

        ``images`` is one of:

        - a tensor [N, …] as the backbone takes it;
        - a tuple of the arguments of its forward, or a dict of them by name, if it takes several (texts and their
          masks, pieces of texts and where each text begins);
        - for a model that 'geartrain worker' saved, one or several pictures: paths, or PIL images.

        Computes 256 images at a time; a tuple or a dict is one batch. Raises InvalidArgument (not a picture, other
        arguments), InvalidRows.
        """
        device = next((item.device for item in self.backbone.parameters()), torch.device("cpu"))
        batches = (moved(batch, device) for batch in self._batches(images))
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            found = [run(self.backbone, batch).float().cpu() for batch in batches]
        finally:
            self.backbone.train(was_training)
        features_ND = torch.cat(found) if found else torch.empty(0, self.centers.shape[-1])
        if features_ND.ndim != 2 or features_ND.shape[1] != self.centers.shape[-1]:
            raise InvalidRows(
                f"the backbone gives features {list(features_ND.shape)}; the centers need [N, {self.centers.shape[-1]}]"
            )
        return features_ND

    @torch.no_grad()
    def scores(self, features_ND: Tensor) -> Tensor:
        """Return the score [N, C] of each class: cosines, at most 1, or products (:attr:`is_cosine`)."""
        if self.is_cosine:
            centers_SD = functional.normalize(self.centers, dim=-1).flatten(0, -2)
            cosines_NS = functional.normalize(features_ND, dim=1) @ centers_SD.T
            return scores_of_classes(cosines_NS, len(centers_SD) // len(self.centers))
        products_NC = features_ND @ self.centers.T
        return products_NC if self.biases is None else products_NC + self.biases

    @torch.no_grad()
    def best(self, features_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores [N, k] and numbers [N, k] of the best classes, best first; of equal ones the lower first."""
        scores, order = self.scores(features_ND).sort(dim=1, descending=True, stable=True)
        return scores[:, :k], order[:, :k]

    def predict(self, images: ImageInputs, k: int = 5) -> list[list[tuple[str, float]]]:
        """Return (name, score) of the ``k`` best classes of each image, best first; all, if there are fewer.

        Holds a matrix [256, C] of scores. Raises as :meth:`embed`.
        """
        k = min(integer("k", k, 1), len(self.class_names))
        answers = []
        for features_ND in torch.split(self.embed(images), AT_ONCE):
            scores, classes = self.best(features_ND, k)
            for row, ids in zip(scores.tolist(), classes.tolist(), strict=True):
                answers.append([(self.class_names[label], score) for label, score in zip(ids, row, strict=True)])
        return answers

    def to_faiss(self) -> Any:
        """Return the class centers as an exact faiss index, an IndexFlatIP in an IndexIDMap; ids are class numbers.

            index = model.to_faiss()
            scores, classes = index.search(functional.normalize(model.embed(images)).numpy(), 5)

        If scores are cosines, centers have unit length: pass features of unit length, too. A class with several centers
        has an entry for each. Biases are added as a last column: then pass features with a 1 appended.
        Raises ConfigError without ``pip install 'geartrain[serve]'``.
        """
        try:
            import faiss
        except ImportError as exc:
            raise ConfigError(f"to_faiss needs a library: pip install 'geartrain[serve]' ({exc})") from exc
        centers = functional.normalize(self.centers, dim=-1) if self.is_cosine else self.centers
        rows_SD = centers.flatten(0, -2).float()
        if self.biases is not None:
            rows_SD = torch.cat([rows_SD, self.biases[:, None].float()], dim=1)
        index = faiss.IndexIDMap(faiss.IndexFlatIP(rows_SD.shape[1]))
        classes = np.repeat(np.arange(len(self.centers)), len(rows_SD) // len(self.centers))
        index.add_with_ids(rows_SD.contiguous().numpy(), classes)
        return index

    def serve_app(self, **settings: Any) -> Any:
        """Return an ASGI app that serves this model of pictures, for any ASGI server (uvicorn, hypercorn).

            app = geartrain.load_model("runs/faces").serve_app()

        docs/tutorials/serve.md describes its answers. ``settings`` are those of :func:`geartrain.serve_app`, which
        serves exported models without torch. The model is exported to a folder that is removed when this returns.
        Raises ConfigError without ``pip install 'geartrain[serve]'``, and as :meth:`export_onnx`.
        """
        try:
            from geartrain.serving.http.app import serve_app
        except ImportError as exc:
            raise ConfigError(f"serve_app needs a library: pip install 'geartrain[serve]' ({exc})") from exc
        if isinstance(self.backbone, onnx_backbone.OnnxBackbone):
            return serve_app({"model": self.backbone.path.parent}, **settings)
        with tempfile.TemporaryDirectory() as folder:  # mapped files stay usable
            self.export_onnx(folder)
            return serve_app({"model": folder}, **settings)

    def export_onnx(
        self,
        folder: str | Path,
        example: Inputs | None = None,
        *,
        preprocessing: str | None = None,
    ) -> onnx_backbone.Parity:
        """Write the backbone as ONNX, with centers and names; return how far onnxruntime's features are from its own.

        ``folder`` is replaced atomically: ``backbone.onnx`` (``images`` [N, …] -> ``features`` [N, D], any N),
        ``centers.safetensors``, ``names.safetensors``, ``config.json`` with checksums. :func:`load_model` reads it.
        ``example`` is a batch of 2 or more images; a model of pictures needs none. Several inputs are a tuple or dict
        as in :meth:`embed`, each a tensor [N, …], named as forward's arguments. Integer inputs, such as the letters of
        texts, may differ in other sizes than N, too. Nothing is written unless onnxruntime computes the same features,
        on batches of several sizes, within 1e-4 of their length.

        A service of a model of tensors takes these inputs by name. ``preprocessing`` names a function,
        ``"package.module:function"``, from a list of other items, such as texts, to the inputs: a tensor or array
        [N, …], a tuple, or a dict by name. The service runs it only if it is started with the same name:
        ``geartrain serve --preprocessing package.module:function``.

        Raises ConfigError without ``pip install 'geartrain[onnx]'``, InvalidArgument (the backbone cannot be exported,
        the features differ, or a model of pictures is given a preprocessing).
        """
        place = Path(path_name("folder", folder, "the name of a folder"))
        return export_model(self, place, example, preprocessing=preprocessing).parity

    def _batches(self, images: ImageInputs) -> Iterator[Inputs]:
        if isinstance(images, Tensor):
            yield from torch.split(images, AT_ONCE)
            return
        if self.preprocessing is None:
            if isinstance(images, tuple | Mapping):
                yield images
                return
            raise InvalidArgument(
                f"images are {quoted(images)}; this model takes tensors [N, ...], or a tuple or dict of what its "
                "backbone takes: how anything else becomes tensors was not saved with it"
            )
        pictures = iter([images] if isinstance(images, str | Path | Image.Image) else images)
        while several := list(islice(pictures, AT_ONCE)):
            yield torch.from_numpy(np.stack([self.bitmap(item) for item in several]))

    def bitmap(self, picture: str | Path | Image.Image, where: str = "") -> Any:
        """Return a picture as the backbone's input: uint8 [channels, side, side].

        Raises InvalidArgument if it is no picture; the error has its path, or ``where``.
        """
        if self.preprocessing is None:
            raise InvalidArgument(f"{self!r} takes no pictures: how they become tensors was not saved with it")
        if not isinstance(picture, Image.Image):
            where, picture = str(picture), open_picture(Path(picture))
        try:
            return self.preprocessing.bitmap(picture)
        except InvalidArgument as exc:
            raise InvalidArgument(f"{where}: {exc}" if where else str(exc)) from exc


def load_model(
    path: str | Path,
    *,
    backbone: nn.Module | str | None = None,
    head: str | None = None,
    class_names: Sequence[str] | Mapping[int, str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> TrainedModel:
    """Return the model that ``geartrain worker``, :func:`geartrain.save` or an ONNX export wrote to ``path``.

        model = gt.load_model("runs/quickstart/model")
        model.predict("image.png")  # [[("U+4E00", 0.93), ...]]

    Args:
        path: The model's folder, or that of a run.
        backbone: For a model of :func:`geartrain.save`, a module made like the saved one: its parameters are found
            among the saved ones by name and shape. For a worker's model with a user-defined backbone, its name
            ``"package.module:function"``: that code runs only if named here.
        head: For a model of :func:`geartrain.save` with several heads, the name of one, such as ``"head"``.
        class_names: For a model of :func:`geartrain.save`, names of all classes in the order of ids, or a dict with
            names of some by id; other classes are named by their ids.
        preprocessing: For a model of :func:`geartrain.save`, the conversion of pictures to its backbone's input; None:
            it takes only tensors.

    Raises:
        ConfigError: There is no such model.
        ModelDamaged, SnapshotDamaged: A file is missing or changed; the message names it.
        SpecMismatch: The saved model has no such backbone.
        InvalidArgument: An argument is missing, or not for such a model.
    """
    folder = Path(path_name("path", path, "the folder of a model")).absolute()
    if (folder / MODEL).exists():
        return _of_saved(folder, backbone, head, class_names, preprocessing)
    if isinstance(backbone, nn.Module) or any(given is not None for given in (head, class_names, preprocessing)):
        raise InvalidArgument(
            f"{folder} is no model of geartrain.save: it has its backbone and names; leave backbone=, head=, "
            "class_names= and preprocessing= out"
        )
    return _of_folder(folder, backbone)


def picture_model(path: Path, backbone: str | None = None) -> TrainedModel:
    """Return a model of pictures, for ``geartrain predict``. Raises as :func:`load_model`."""
    if (path / MODEL).exists():
        raise InvalidArgument(
            f"{path} was saved by geartrain.save, and how pictures become its tensors was not; predict in Python: "
            "geartrain.load_model(path, backbone=...).predict(tensor)"
        )
    model = load_model(path, backbone=backbone)
    if model.preprocessing is None:
        raise InvalidArgument(
            f"{path} takes tensors: predict in Python: geartrain.load_model(path).predict(tensor), or ask a service: "
            f"geartrain serve {path}"
        )
    return model


def _of_folder(folder: Path, own: str | None) -> TrainedModel:
    """Load a worker's model or an export. User code is imported only if it is named as ``own``."""
    files = unseal_model(folder)
    config = files.config
    name, settings = (made["name"], made["settings"]) if (made := config.get("backbone")) else ("", {})
    try:
        if files.is_onnx:
            network: nn.Module = onnx_backbone.OnnxBackbone(files.folder / ONNX)
        else:
            network = build_backbone(name, settings, own=own)
            network.load_state_dict(load_file(files.folder / BACKBONE))
    except RuntimeError as exc:
        raise ConfigError(f"{files.folder} has parameters of another backbone than {name}: {exc}") from exc
    look = config["preprocessing"]
    tensors = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in files.tensors.items()}
    return TrainedModel(
        backbone=network.eval(),
        centers=tensors[_CENTERS],
        biases=tensors.get("biases"),
        class_names=list(files.class_names),
        is_cosine=config["is_cosine"],
        preprocessing=Preprocessing(**look) if isinstance(look, dict) else None,
        backbone_name=name,
        backbone_settings=settings,
        training=config.get("training", {}),
    )


def save_model(folder: Path, model: TrainedModel, centers: Path | None = None) -> None:
    """Replace ``folder`` by this model of pictures; :func:`load_model` makes its backbone by its name.

    If the file ``centers`` is given, it becomes part of the folder, and the model's own centers may be on the meta
    device.
    """
    assert model.preprocessing is not None
    config = {
        "backbone": {"name": model.backbone_name, "settings": model.backbone_settings},
        "preprocessing": model.preprocessing.to_json(),
        "num_classes": len(model.class_names),
        "dim": model.centers.shape[-1],
        "is_cosine": model.is_cosine,
        "training": model.training,
    }
    with replacing_folder(folder) as staging:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.backbone.state_dict().items()}
        save_file(state, staging / BACKBONE)
        if centers is None:
            write_arrays(staging / CENTERS, {_CENTERS: as_numpy(model.centers.detach().cpu())})
        else:
            centers.replace(staging / CENTERS)
        seal_model(staging, model.class_names, config)


def save_model_of_head(folder: Path, model: TrainedModel, head: ClassHead, *, is_first: bool) -> None:
    """Replace ``folder`` by this model with the rows of ``head`` as centers; ``model.centers`` are on the meta device.

    Every rank calls it, the first one writes. Rows are sent and written 8 MiB at a time, so that no rank needs memory
    for all of them. Raises the errors of :func:`geartrain.bridge.head.weights.export_class_weights`.
    """
    centers = folder.with_name(f".{folder.name}.centers.part.safetensors")
    try:
        if is_first or head.backend.local is not None:
            write_centers(head, centers, _CENTERS)
        if is_first:
            save_model(folder, model, centers)
    finally:
        if is_first:
            centers.unlink(missing_ok=True)


def _of_saved(
    folder: Path,
    backbone: nn.Module | str | None,
    head: str | None,
    class_names: Sequence[str] | Mapping[int, str] | None,
    preprocessing: Preprocessing | None,
) -> TrainedModel:
    if not isinstance(backbone, nn.Module):
        raise InvalidArgument(
            f"backbone is {quoted(backbone)}; {folder} holds the parameters of modules that are code of yours: give "
            "the one that makes the features, load_model(path, backbone=MyBackbone())"
        )
    record = read_record(folder)
    state = DividedRows(folder, record.pieces).whole(read_state(folder, record)["model"])
    name, said = _head_of(folder, state, head)
    num_classes = int(said["num_classes"])
    class_ids = LiveClasses(num_classes, said["retired_runs"]).all_ids
    by_id = class_names if isinstance(class_names, Mapping) else dict(enumerate(class_names or ()))
    unnamed = [label for label in class_ids.tolist() if label not in by_id]
    if (unnamed or len(by_id) > num_classes) and isinstance(class_names, Sequence):
        needed = f"class {unnamed[0]} lives and has none" if unnamed else f"the head has {num_classes} classes"
        raise InvalidArgument(f"class_names are {counted(len(by_id), 'name')}, by id; {needed}: a dict may name some")
    _fill(folder, backbone, state)
    rows_CD = _rows(folder, record, name, class_ids)
    dim, sub_centers = int(said["dim"]), int(said.get("sub_centers", 1))
    return TrainedModel(
        backbone=backbone.eval(),
        centers=rows_CD.view(-1, sub_centers, dim) if sub_centers > 1 else rows_CD[:, :dim].contiguous(),
        biases=rows_CD[:, dim].contiguous() if said.get("bias") else None,
        class_names=[str(by_id.get(label, label)) for label in class_ids.tolist()],
        is_cosine=said["margin"] != repr(None),
        preprocessing=preprocessing,
    )


def _head_of(folder: Path, state: Mapping[str, Any], head: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the head's name and its extra state."""
    suffix = "_extra_state"
    heads = {
        key.removesuffix(suffix).removesuffix("."): value
        for key, value in state.items()
        if key.endswith(suffix) and isinstance(value, Mapping) and "retired_runs" in value
    }
    if head is None and len(heads) == 1:
        head = next(iter(heads))
    if head is None or head not in heads:
        raise InvalidArgument(f"head is {head!r}; {folder} has the heads {sorted(heads)}: name one of them")
    return head, heads[head]


def _fill(folder: Path, backbone: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the parameters of ``backbone`` from ``state``, where their names have a common prefix."""
    wanted = backbone.state_dict()
    if not wanted:
        return
    first = next(iter(wanted))
    prefixes = [key.removesuffix(first) for key in state if key == first or key.endswith(f".{first}")]
    fitting = [
        prefix
        for prefix in prefixes
        if all(prefix + key in state and _alike(state[prefix + key], value) for key, value in wanted.items())
    ]
    if len(fitting) != 1:
        found = f"several such: {sorted(fitting)}" if fitting else "none such"
        shown = ", ".join(f"{key} {list(value.shape)}" for key, value in list(wanted.items())[:3])
        raise SpecMismatch(
            f"backbone has {shown}{', …' if len(wanted) > 3 else ''}; {folder} holds {found}, but "
            f"{', '.join(list(state)[:8])}. Make it like the saved one"
        )
    backbone.load_state_dict({key: state[fitting[0] + key] for key in wanted})


def _alike(saved: Any, mine: Any) -> bool:
    return isinstance(saved, Tensor) and isinstance(mine, Tensor) and saved.shape == mine.shape


def _rows(folder: Path, record: ModelRecord, module: str, ids: Any) -> Tensor:
    """Return the rows [N, dim], float32, with these ``ids`` of the head called ``module``."""
    (table,) = record.modules[module]
    path = next(folder / rows.folder for rows in record.rows if module in rows.modules)
    with local() as cluster:  # it computes initial values, and later values of rows that no step touched
        cluster.restore(path, tables=[table])
        opened = cluster.table(table)
        rows = torch.empty(len(ids), opened.spec.dim)
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[start : start + _ROWS_AT_ONCE]
            out = torch.empty(len(some), opened.spec.dim, dtype=TORCH_DTYPES[opened.spec.dtype])
            opened.pull_into(some, as_numpy(out))
            rows[start : start + len(some)] = out
    return rows
