"""``gt.Publisher``: publishes versions from a custom training loop for servers that follow it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.arguments import integer, path_name
from geartrain.ams.values.errors import InvalidArgument, SnapshotFailed
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.job.state import JobProgress, JobState
from geartrain.workers.live.graph import example_of, live_graph
from geartrain.workers.live.network import LAYOUT, NETWORK, LiveNetwork

logger = logging.getLogger(__name__)

_CLASSES = "classes.json"


class Publisher:
    """Writes versions of a backbone and its class head to a folder for ``geartrain serve --follow FOLDER``.

        publisher = gt.Publisher(backbone, head, "live/people", preprocessing=gt.Preprocessing(size=64))
        for step in ...:
            ...
            if step % 100 == 0:
                publisher.publish(step)

    Training continues while a version is written: it is a snapshot of the head's table, mostly of changed rows alone.
    Added and removed classes appear in the served model, too.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: ClassHead,
        folder: str | Path,
        *,
        preprocessing: Preprocessing,
        class_names: Sequence[str] | Mapping[int, str] | None = None,
        increments: int = 20,
        keep: int = 3,
    ) -> None:
        """Make the graph of ``backbone``, which takes some seconds.

        Args:
            backbone: Bitmaps uint8 [N, K, S, S] -> features [N, D]; the module itself, not DistributedDataParallel.
            head: Its class head, in a cluster or on ranks. Rows on ranks are written in full each time, by all ranks
                together; in a cluster the first rank alone publishes.
            folder: A folder or URL of its own, which the shards see as this process does.
            preprocessing: How pictures become bitmaps.
            class_names: Name of each class, or by its id; read for each version: new ones may be added. None: ids.
            increments: Versions of only the changes, between two of all rows.
            keep: Versions that stay, with those they build on.

        Raises:
            InvalidArgument: The backbone cannot be exported, or its features differ under onnxruntime.
            ConfigError: A library is missing (``pip install 'geartrain[onnx]'``).
        """
        if not (isinstance(backbone, nn.Module) and isinstance(head, nn.Module)):
            raise InvalidArgument(
                f"backbone is {quoted(backbone)} and head {quoted(head)}; give a torch.nn.Module and a gt.ClassHead"
            )
        self._backbone, self._head = backbone, head
        self._preprocessing, self.class_names = preprocessing, class_names
        self._network: LiveNetwork = live_graph(backbone, example_of(preprocessing))
        self._failure = ""
        self._newest: int | None = None
        """Step of the version begun last."""
        peers = head.backend.peers
        self._snapshots = JobSnapshots(
            self,
            str(path_name("folder", folder, "a folder or URL")),
            is_first=peers is None or peers.rank == 0,
            keep=integer("keep", keep, 1),
            increments=integer("increments", increments, 0) if head.backend.local is None else 0,
            say=self._print_line,
        )

    def publish(self, step: int, *, wait: bool = False) -> None:
        """Write a version, between two steps; ``step`` ascends. Returns once its moment is frozen, or with ``wait``
        once followers can see it. Waits for the version before.

        A failure is logged, and the next version contains its changes; with ``wait`` SnapshotFailed is raised.
        """
        self._snapshots.start(self._state(integer("step", step, 0)))
        self._newest = step
        if wait:
            self.close()

    def close(self) -> None:
        """Wait for the last version. Raises SnapshotFailed if it was not written, as no later one contains it."""
        self._snapshots.wait()
        last = self._snapshots.last
        if self._newest is not None and (last is None or last.progress.step != self._newest):
            raise SnapshotFailed(self._failure)

    def start_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """Freeze ``state`` and the rows as the snapshot ``root``/``name``; internal."""
        content: dict[str, Any] = {"step": state.progress.step, "values": state.values(), "files": state.all_files()}
        cluster = self._head.backend.settings.cluster
        if cluster is not None:
            return cluster.snapshot(root, name, parent=parent, tables=[self._head.name], graphs=False, **content)
        written: Future[Place] = Future()
        written.set_result(self._head.snapshot(root, name, **content))
        return PendingSnapshot(written.result(), written)

    def _state(self, step: int) -> JobState:
        names = {} if self.class_names is None else self.class_names
        layout = {"parameters": self._network.layout_to_json(), "preprocessing": self._preprocessing.to_json()}
        return JobState(
            job="publisher",
            recipe=None,
            progress=JobProgress(step=step, stage_start=0, stage_steps=0, table=self._head.name),
            cursor={},
            data={"head": self._head.get_extra_state()},
            tensors={"backbone": self._backbone.state_dict(), "random": []},
            files={
                NETWORK: self._network.graph,
                LAYOUT: json.dumps(layout).encode(),
                _CLASSES: json.dumps(
                    dict(names) if isinstance(names, Mapping) else list(names), ensure_ascii=False
                ).encode(),
            },
        )

    def _print_line(self, line: str) -> None:
        self._failure = line
        logger.warning("%s", line)
