"""Writer of a training's snapshots as version folders to serve: ``OUT/000000120/``, the newest last.

A version is made from one snapshot, so that network, class rows and names are of one moment. Its cost is that of the
changes: the network's graph is made once, and rows are updated from those of the version before.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.errors import ConfigError, ModelDamaged, SnapshotDamaged
from geartrain.serving.index.distributed_index import bounds
from geartrain.serving.live.centers import LiveCenters, centers_of
from geartrain.serving.live.child import ExportProcess, run_child
from geartrain.serving.live.index import LiveIndex
from geartrain.serving.live.training import ExportedModel
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.live.network import LAYOUT, NETWORK, LiveNetwork
from geartrain.workers.live.state_arrays import state_dict_arrays
from geartrain.workers.models.saved_model import (
    CENTERS,
    CONFIG,
    NAMES,
    ONNX,
    read_config,
    read_files,
    seal_folder,
    seal_model,
    sealed_files,
    unseal_folder,
    write_arrays,
)

_EXPORTED = ("ctr", "tdm")
"""Jobs whose versions are full exports: ten seconds for the first, two for the next."""
_STATE, _CLASSES = "training.safetensors", "classes.json"


@dataclass(frozen=True)
class _Graph:
    """Graph of a training's network."""

    network: LiveNetwork
    preprocessing: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LiveVersion:
    """A written version."""

    folder: Path
    version: int
    step: int
    """Step of the training."""
    created: float
    """Unix time of the snapshot."""
    moment_id: str
    """Moment of the snapshot."""


class LiveVersions:
    """Versions of one training in a folder. Used from one thread."""

    def __init__(
        self,
        out: Path,
        *,
        keep: int = 3,
        backbone: str | None = None,
        recall: float = 1.0,
        part: str | None = None,
        has_rows: bool = True,
    ) -> None:
        """``keep`` versions stay; ``backbone`` is user code, by name; ``recall`` is that of :class:`LiveIndex`, whose
        ConfigError this raises; ``part`` "2/3": only the second of three parts of the classes; without ``has_rows``
        other services have the class rows."""
        self.out = out
        self.index = LiveIndex(out, recall)
        self._keep, self._own, self._has_rows = keep, backbone, has_rows
        self._part = None if part is None else [int(number) for number in part.split("/")]
        self._said_part = {} if part is None else {"part": self._part}
        self._exporter = ExportProcess()
        self._graphs: dict[str, _Graph] = {}
        self._centers: LiveCenters | None = None
        self._last = -1

    def written(self) -> list[LiveVersion]:
        """Return the existing versions, newest first."""
        return [found for path in reversed(self._folders()) if (found := _version_in(path)) is not None]

    def close(self) -> None:
        """Stop the processes that write versions."""
        self.index.close()
        self._exporter.close()

    def prune(self, served: Collection[int | None] = ()) -> list[int]:
        """Remove versions beyond those that stay and those in ``served``; return their numbers."""
        old = [folder for folder in self._folders()[: -self._keep] if int(folder.name) not in served]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return [int(folder.name) for folder in old]

    def drop(self, version: LiveVersion) -> None:
        """Remove the newest version, which is not served. Its number is free again."""
        shutil.rmtree(version.folder, ignore_errors=True)
        self._last = version.version - 1

    def write(self, snapshot: Snapshot | ExportedModel, is_ending: Callable[[], bool] = lambda: False) -> LiveVersion:
        """Write the snapshot as the next version; ``is_ending`` returns whether it is no longer needed.

        Its number is the step (of an exported model its version), or the last plus one where a training went back.
        Raises SnapshotDamaged, SnapshotNotFound (removed meanwhile), ModelDamaged (an exported model is damaged or
        incomplete), ConfigError (a job that cannot be served), OSError (such as a full disk); then no version is
        written.
        """
        if isinstance(snapshot, ExportedModel):
            folder = self._copy(snapshot)
        elif (job := snapshot.manifest.job.get("job")) in _EXPORTED:
            if self._part or not self._has_rows:
                raise ConfigError(f"{snapshot.path} is of a job {job!r}; only classes have parts: leave them out")
            folder = self._export(snapshot, is_ending)
        else:
            folder = self._write_pictures(snapshot, is_ending)
        self.index.start(folder)
        found = _version_in(folder)
        assert found is not None
        self._last = found.version
        return found

    def _number(self, step: int) -> int:
        self._last = max([self._last, *(int(folder.name) for folder in self._folders())])
        return max(step, self._last + 1)

    def _copy(self, exported: ExportedModel) -> Path:
        """Copy an exported model, which may be removed or replaced afterwards; return the folder."""
        folder = self.out / f"{self._number(exported.version):09}"
        training = {"step": exported.step, "moment": exported.moment_id}
        with replacing_folder(folder) as staging:
            if self._part or not self._has_rows:
                self._copy_part(exported.folder, staging, {"version": int(folder.name), "training": training})
                return folder
            try:
                shutil.copytree(exported.folder, staging, dirs_exist_ok=True)
            except shutil.Error as exc:  # for each file
                raise OSError(exc.args[0][0][2]) from exc
            try:
                config = unseal_folder(staging)
            except (ConfigError, ModelDamaged):
                unseal_folder(exported.folder)  # names the file there
                raise ModelDamaged(f"{exported.folder} changed while it was copied; it is copied again") from None
            (staging / CONFIG).unlink()
            training = {**config.get("training", {}), **training}
            seal_folder(staging, {**config, "version": int(folder.name), "training": training})
        return folder

    def _copy_part(self, exported: Path, staging: Path, said: Mapping[str, Any]) -> None:
        """Copy this service's part of the classes of an exported classifier; ``said`` is added to its config."""
        config = unseal_folder(exported)
        if CENTERS not in sealed_files(config):
            raise ConfigError(f"{exported} is no classifier, whose classes have parts; serve it without part and parts")
        files = read_files(exported, config)
        first, stop = 0, len(files.class_names)
        if self._part is not None:
            first, stop = bounds(stop, *self._part)
        rows = slice(first, stop if self._has_rows else first)
        arrays = {name: array[rows] for name, array in files.tensors.items()}
        arrays["ids"] = files.tensors.get("ids", np.arange(stop))[first:stop]
        write_arrays(staging / CENTERS, arrays)
        for name in sealed_files(config) - {CONFIG, CENTERS, NAMES, *(config.get("index") or {}).get("files", ())}:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(exported / name, staging / name)
        if read_config(exported) != config:
            raise ModelDamaged(f"{exported} changed while it was copied; it is copied again")
        index = self.index.write(
            staging, arrays["centers"], arrays.get("biases"), arrays["ids"], is_cosine=config["is_cosine"]
        )
        config = {**config, **said, "num_classes": stop - first, **self._said_part, "index": index}
        seal_model(staging, files.class_names[first:stop], config)

    def _export(self, snapshot: Snapshot, is_ending: Callable[[], bool]) -> Path:
        """Export a snapshot of a click model or a tree of items in full, by a process with torch; return the folder."""
        made = self.out / ".export"
        shutil.rmtree(made, ignore_errors=True)
        try:
            self._exporter.export(str(snapshot.path), str(made), is_ending=is_ending)
            config = unseal_folder(made)
            config["version"] = self._number(int(config["training"]["step"]))
            (made / CONFIG).unlink()
            seal_folder(made, config)
            folder = self.out / f"{config['version']:09}"
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return folder

    def _write_pictures(self, snapshot: Snapshot, is_ending: Callable[[], bool]) -> Path:
        job: Mapping[str, Any] = snapshot.manifest.job
        try:
            head: Mapping[str, Any] = job["data"]["head"]
            table, dim = str(head["table"]), int(head["dim"])
            live = LiveClasses(int(head["num_classes"]), head["retired_runs"])
            sub_centers, has_bias = int(head["sub_centers"]), bool(head["bias"])
            is_cosine = head["margin"] != repr(None)
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(
                f"{snapshot.path} holds no classifier ({exc!r}); follow a run of 'geartrain worker classify', "
                "'glyphs', 'ctr' or 'tdm', or what gt.Publisher writes"
            ) from exc
        files = snapshot.job_files()
        graph = self._graph(snapshot, files, is_ending)
        if self._part is not None:
            live = live.between(*bounds(live.num_live_classes, *self._part))
        whole = np.empty((0, sub_centers * dim + has_bias), np.float32)
        if self._has_rows:
            self._centers = centers_of(snapshot, table, live, self._centers, unit=dim if is_cosine else None)
            whole = self._centers.rows
        rows = whole[:, : sub_centers * dim]
        ids = live.all_ids
        arrays: dict[str, Any] = {"centers": rows.reshape(-1, sub_centers, dim) if sub_centers > 1 else rows}
        if has_bias:
            arrays["biases"] = np.ascontiguousarray(whole[:, -1])
        if not live.are_all:
            arrays["ids"] = ids
        version = self._number(snapshot.manifest.step)
        folder = self.out / f"{version:09}"
        with replacing_folder(folder) as staging:
            graph.network.write(staging / ONNX, state_dict_arrays(files[_STATE], "backbone"))
            write_arrays(staging / CENTERS, arrays)
            config = {
                "kind": "pictures",
                "version": version,
                "created": snapshot.manifest.created,
                "is_cosine": is_cosine,
                "preprocessing": graph.preprocessing,
                "num_classes": len(ids),
                "dim": dim,
                "precision": "fp32",
                "training": {
                    "job": table,
                    "step": snapshot.manifest.step,
                    "moment": snapshot.manifest.moment_id,
                },
                **self._said_part,
            }
            index = self.index.write(staging, arrays["centers"], arrays.get("biases"), ids, is_cosine=is_cosine)
            seal_model(staging, _names(files, ids), config if index is None else {**config, "index": index})
        return folder

    def _graph(self, snapshot: Snapshot, files: Mapping[str, bytes], is_ending: Callable[[], bool]) -> _Graph:
        """Return the graph in the snapshot, or one made from its job, once per process: the code of an earlier process
        may have been another."""
        if NETWORK in files:
            said = _parsed(files[LAYOUT], snapshot)
            return _Graph(LiveNetwork.from_json(files[NETWORK], said["parameters"]), said["preprocessing"])
        made_of = _made_of(snapshot.manifest.job, self._own)
        if made_of not in self._graphs:
            self._graphs = {made_of: _made_graph(snapshot, self._own, is_ending)}
        return self._graphs[made_of]

    def _folders(self) -> list[Path]:
        inside = self.out.iterdir() if self.out.is_dir() else ()
        return sorted((path for path in inside if path.name.isdecimal()), key=lambda path: int(path.name))


def _version_in(folder: Path) -> LiveVersion | None:
    """Return the version in a folder by its config.json; None: it is no version, or damaged."""
    try:
        config = read_config(folder)
        training = config["training"]
        return LiveVersion(
            folder=folder,
            version=int(config["version"]),
            step=int(training["step"]),
            created=float(config["created"]),
            moment_id=str(training["moment"]),
        )
    except (ConfigError, ModelDamaged, KeyError, TypeError, ValueError):
        return None


def _made_of(job: Mapping[str, Any], own: str | None) -> str:
    """Return a key that tells apart jobs whose networks may differ, and states of user code."""
    said = json.dumps([job.get("recipe"), job["data"].get("backbone_settings")], sort_keys=True).encode()
    if own is not None:
        with suppress(ImportError, AttributeError, TypeError, OSError):  # making the graph reports the error
            said += Path(find_spec(own.partition(":")[0]).origin).read_bytes()  # type: ignore[arg-type, union-attr]
    return xxhash.xxh3_128_hexdigest(said)


def _made_graph(snapshot: Snapshot, own: str | None, is_ending: Callable[[], bool]) -> _Graph:
    """Make the graph in a child process, as it needs torch. Raises ConfigError, SnapshotDamaged."""
    with tempfile.TemporaryDirectory(prefix="geartrain-graph-") as folder:
        what = f"the graph of the network of {snapshot.path}"
        module = "geartrain.workers.live.graph"
        run_child(what, module, str(snapshot.path), folder, *([own] if own else []), is_ending=is_ending)
        said = json.loads((Path(folder) / LAYOUT).read_text(encoding="utf-8"))
        network = LiveNetwork.from_json((Path(folder) / ONNX).read_bytes(), said["parameters"])
        return _Graph(network, said["preprocessing"])


def _names(files: Mapping[str, bytes], ids: Any) -> list[str]:
    """Return names of the live classes; a class without a name is named by its id."""
    given: Any = json.loads(files[_CLASSES]) if _CLASSES in files else {}
    if isinstance(given, list):
        return [str(given[label]) if label < len(given) else str(label) for label in ids.tolist()]
    return [str(given.get(str(label), label)) for label in ids.tolist()]


def _parsed(text: bytes, snapshot: Snapshot) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise SnapshotDamaged(f"{snapshot.path} does not say how its network is laid out: {exc}") from exc
