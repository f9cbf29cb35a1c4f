"""Writes what a training's snapshots hold as folders of versions to serve: ``OUT/000000120/``, the newest the last.

A version is made of one snapshot alone, so that network, class rows and names are of one moment. It costs what changed:
the graph of the network is made once, rows are brought from those of the version before.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.errors import ConfigError, SnapshotDamaged
from geartrain.serving.live.centers import LiveCenters, centers_of
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.live.network import LAYOUT, NETWORK, LiveNetwork
from geartrain.workers.live.state_arrays import state_dict_arrays
from geartrain.workers.models.saved_model import CENTERS, ONNX, seal_model, write_arrays

_STATE, _CLASSES = "training.safetensors", "classes.json"
_GRAPH_SECONDS = 600.0


@dataclass(frozen=True)
class _Graph:
    """The network of a training."""

    network: LiveNetwork
    preprocessing: Mapping[str, Any]


class LiveVersions:
    """Versions of one training in a folder. Used from one thread."""

    def __init__(self, out: Path, *, keep: int = 3, backbone: str | None = None) -> None:
        """``keep`` of them stay; ``backbone`` is code of the person's own, as they named it."""
        self.out = out
        self._keep, self._own = keep, backbone
        self._graphs: dict[str, _Graph] = {}
        self._centers: LiveCenters | None = None
        self._last = 0

    def write(self, snapshot: Snapshot) -> Path:
        """Write the snapshot as the next version; return its folder. Older ones than are kept are removed.

        Its number is the step, or one more than the last where a training went back. Raises SnapshotDamaged,
        SnapshotNotFound (removed meanwhile), ConfigError (not a job that can be served), OSError (such as a full disk):
        then nothing has changed.
        """
        job: Mapping[str, Any] = snapshot.manifest.job
        try:
            head: Mapping[str, Any] = job["data"]["head"]
            table, dim = str(head["table"]), int(head["dim"])
            living = LiveClasses(int(head["num_classes"]), head["retired_runs"])
            sub_centers, has_bias = int(head["sub_centers"]), bool(head["bias"])
            is_cosine = head["margin"] != repr(None)
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(
                f"{snapshot.path} holds no classifier ({exc!r}); follow a run of 'geartrain worker classify' or "
                "'glyphs', or what gt.Publisher writes"
            ) from exc
        files = snapshot.job_files()
        graph = self._graph(snapshot, files)
        centers = centers_of(snapshot, table, living, self._centers, unit=dim if is_cosine else None)
        rows = centers.rows[:, : sub_centers * dim]
        ids = living.all_ids
        arrays: dict[str, Any] = {"centers": rows.reshape(-1, sub_centers, dim) if sub_centers > 1 else rows}
        if has_bias:
            arrays["biases"] = np.ascontiguousarray(centers.rows[:, -1])
        if not living.are_all:
            arrays["ids"] = ids
        version = max(snapshot.manifest.step, self._last + 1)
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
                "training": {"job": table, "step": snapshot.manifest.step, "snapshot": str(snapshot.path)},
            }
            seal_model(staging, _names(files, ids), config)
        self._centers, self._last = centers, version
        self._prune()
        return folder

    def _graph(self, snapshot: Snapshot, files: Mapping[str, bytes]) -> _Graph:
        """That of the snapshot itself, or one made of its job, once."""
        if NETWORK in files:
            said = _parsed(files[LAYOUT], snapshot)
            return _Graph(LiveNetwork.from_json(files[NETWORK], said["parameters"]), said["preprocessing"])
        job: Mapping[str, Any] = snapshot.manifest.job
        key = json.dumps([job.get("recipe"), job["data"].get("backbone_settings")], sort_keys=True)
        if key not in self._graphs:
            self._graphs = {key: _made_graph(snapshot, self._own)}
        return self._graphs[key]

    def _prune(self) -> None:
        found = sorted((path for path in self.out.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        for old in found[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def _made_graph(snapshot: Snapshot, own: str | None) -> _Graph:
    """Made by a process of its own: it needs torch, this one does not. Raises ConfigError, SnapshotDamaged."""
    with tempfile.TemporaryDirectory(prefix="geartrain-graph-") as folder:
        command = [sys.executable, "-P", "-m", "geartrain.workers.live.graph", str(snapshot.path), folder]
        try:
            done = subprocess.run(
                [*command, *([own] if own else [])],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_GRAPH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise ConfigError(f"the graph of the network was not made in {_GRAPH_SECONDS:g} s") from exc
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise ConfigError(f"the graph of the network of {snapshot.path} was not made: {last}")
        said = json.loads((Path(folder) / LAYOUT).read_text(encoding="utf-8"))
        network = LiveNetwork.from_json((Path(folder) / ONNX).read_bytes(), said["parameters"])
        return _Graph(network, said["preprocessing"])


def _names(files: Mapping[str, bytes], ids: Any) -> list[str]:
    """Names of the living classes; that of one without a name is its id."""
    given: Any = json.loads(files[_CLASSES]) if _CLASSES in files else {}
    if isinstance(given, list):
        return [str(given[label]) if label < len(given) else str(label) for label in ids.tolist()]
    return [str(given.get(str(label), label)) for label in ids.tolist()]


def _parsed(text: bytes, snapshot: Snapshot) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise SnapshotDamaged(f"{snapshot.path} does not say how its network is laid out: {exc}") from exc
