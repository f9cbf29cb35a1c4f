"""KNN softmax: the classes nearest to the labels are active in a step (100-million-class paper, section 3.2).

The graph of nearest class centers is built from the current rows: on rank 0, or by the cluster's graph service, and
sent to all ranks; if ranks hold the rows, by all of them together, and each keeps the lists of its own classes. It is
used until the next build, so it is older than the rows; ``graph_age`` is its age in updates. By default there is none
of the initial rows, which carry no similarity: until the first build negatives are random.

Legend: B labels, C classes, D width, k neighbours of a class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import TableRows
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import ActiveClasses, Ranking, Selection, positives_and_sample
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import GeartrainError, InvalidArgument, SpecMismatch
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.graph_build import GraphBuild, GraphSource, OnPairs, built_for_all
from geartrain.bridge.head.selection.graph_by_list import lists_by_class, table_of_lists
from geartrain.bridge.head.selection.graph_by_neighbour import OwnNeighbours
from geartrain.bridge.head.selection.graph_change import nearest_classes, renumbered, with_new
from geartrain.bridge.head.selection.served_graph import TableGraphs
from geartrain.bridge.rows.serialization import RowsOfRank, state_from_bytes, state_to_bytes
from geartrain.bridge.rows.tables import ReadableTable

logger = logging.getLogger(__name__)

SHARE = 0.1
"""Share of training time for building graphs with ``rebuild="auto"``."""
SHORT_SECONDS = 1.0
"""Seconds up to which a build may exceed that share: it is then due by operations alone, as in a resumed run."""
OLD = 5
"""Number of builds that could have been made since, after which a graph counts as old."""


@final
@dataclass(frozen=True)
class KNNSoftmax(Selection):
    """Selection of the labels and their nearest classes, round(active · C) in all; given to a head as ``select``.

    After the distinct labels come the nearest neighbour of each, then the second ones, and so on, up to ``near`` of the
    places that labels leave; random other classes fill the rest. Labels are always kept: if they alone exceed the
    budget, they enlarge it. The active classes are a function of (labels, seed, step, graph), the same on every rank.


    Building costs 2·C²·D operations and one pull of all rows, in 4·C·k bytes beside them; ranks are sent 4·C·k bytes. A
    cluster with a graph service (``client.graph``) builds there, unless classes are retired. With rows on the ranks
    each of R ranks has 2·C²·D / R operations (``rank_ring.py``), and keeps the lists of its own classes, (4·C·k + 8·C)
    / R bytes of its host; where its rows are it keeps those neighbours of all lists that are its own classes, 6·C·k / R
    + 8·C bytes, selects by them, and sends 8·k bytes of counts a step (``graph_by_neighbour.py``). A step costs
    O(active). With ``"background"`` rows move while they are read: unless all fit in memory, the graph is of a mixture
    of their versions.

    """

    active: float = 0.1
    """Share of active classes, in (0, 1]; 1 is the full softmax, which needs no graph."""
    k: int = 32
    """Neighbours kept of each class, at most C − 1. Enough is active · C / (distinct labels)."""
    rebuild: str | int = "auto"
    """When the graph is built. ``"auto"``: as soon as that takes a tenth of the operations of the steps since the last
    build (C² against 6·P·A for a step of P distinct labels and A active classes), so that every rank and a resumed run
    find the same step; and by the first step after ``head.next_epoch()``. Until the first build all negatives are
    random, as with :class:`PartialFC`; ``head.rebuild_graph()`` builds one of rows that are meaningful from the start
    (imprinted, or trained before). If a build takes more than a second and a tenth of the time by the clock, the next
    ones are made half as often: ranks agree on it and it is part of the head's state, but another run may differ. The
    other values build the first graph in the first training forward. ``"epoch"``: then by the first step after
    ``head.next_epoch()``. A number: by the first step that many updates after the last build, whatever it takes.
    ``"background"``: in parallel with training, started by ``head.next_epoch()`` and used from the first step after its
    end."""
    seed: int = 0
    """Key of the random classes, with the step; an unsigned 64-bit integer."""
    near: float = 0.5
    """Share of the negatives that the graph selects, in [0, 1]; the others are random. A few negatives that are all
    near teach a network little about the other classes (``geartrain bench defaults``); a few near ones, little about
    similar classes (``geartrain bench accuracy``)."""
    takes_sub_centers: ClassVar = False

    def __post_init__(self) -> None:
        if not 0.0 < self.active <= 1.0:
            raise InvalidArgument(f"active is {self.active!r}; it must lie in (0, 1]")
        if not 0.0 <= self.near <= 1.0:
            raise InvalidArgument(f"near is {self.near!r}; it must lie in [0, 1]")
        integer("k", self.k, 1)
        is_steps = isinstance(self.rebuild, int) and not isinstance(self.rebuild, bool) and self.rebuild >= 1
        if not is_steps and self.rebuild not in ("auto", "epoch", "background"):
            raise InvalidArgument(
                f"rebuild is {self.rebuild!r}; it must be 'auto', 'epoch', 'background' or a number >= 1"
            )
        integer("seed", self.seed, 0, 2**64 - 1)

    def budget(self, num_classes: int) -> int:
        """Return round(active · num_classes), at least 1."""
        return max(1, round(self.active * num_classes))

    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:  # noqa: ARG002
        """Raise InvalidArgument: the selection needs the graph of a head's rows."""
        raise InvalidArgument("KNNSoftmax selects by the graph of a head's rows; ask the head's select for a choice")

    def steps_between_draws(self, num_classes: int) -> float:
        """Return num_classes / budget, on average."""
        return num_classes / self.budget(num_classes)

    def neighbours_of(self, num_classes: int) -> int:
        """Return ``k``, unless all classes are active (0)."""
        return self.k if self.budget(num_classes) < num_classes else 0

    def bound(self, backend: Any) -> KNNSelection:
        """Return the selection with the graph of these rows."""
        update = backend.update
        select = KNNSelection(self, backend.table, backend.peers, lambda: update.step, backend.graph_source())
        select.live_classes = backend.live_classes
        return select


@dataclass(frozen=True, eq=False)
class Graph:
    """Graph of nearest classes, with its version and origin."""

    table: NeighbourTable
    """Neighbours in numbers of the live classes (ids, if none is retired); if ranks hold rows, this rank's part."""
    version: int
    """Number of the graph, from 1; adding or retiring classes changes a graph and counts, too."""
    step: int
    """Updates of the rows when the build started."""
    classes: int = 0
    """Fingerprint of its live classes."""


class KNNSelection(Selection):
    """:class:`KNNSoftmax` bound to a head: it holds the graph of the head's table. Not thread-safe."""

    def __init__(
        self,
        settings: KNNSoftmax,
        table: ReadableTable,
        ranks: Communicator | None,
        step: Callable[[], int],
        source: GraphSource | None = None,
    ) -> None:
        """``step`` returns the updates applied so far; graphs are made of the rows of ``source``, None: pulled ones.

        Every rank makes the same calls in the same order.
        """
        self.settings = settings
        self.live_classes = LiveClasses(table.spec.num_rows or 0)
        """Live classes of the head; :meth:`follow` changes them."""
        self.graph: Graph | None = None
        """Graph in use; None before the first: negatives are random."""
        self._own: tuple[NeighbourTable, OwnNeighbours] | None = None
        """This rank's part of the graph, and its division by neighbour."""
        self.on_progress: OnPairs | None = None
        """Function called while a graph is built, on every rank that builds."""
        self.enlarged = 0
        """Number of batches whose labels alone exceeded the budget."""
        self._table = table
        self._source = TableGraphs(table) if source is None else source
        self._parts = self._source.parts
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._step = step
        self._is_due = False
        self._prepared: int | None = None
        self._is_training = False
        """Whether the next selection is for a training step."""
        self._work = 0
        """Pairs of labels and active classes in the training steps since the last build."""
        self._backoff = 1
        """Factor by which builds are rarer than operations allow, because the clock requires it."""
        self._built_at = time.monotonic()
        self._has_warned = False
        self._pending: GraphBuild | None = None
        self._ending: GraphBuild | None = None
        """Build that was cancelled last: a service builds one graph of a table at a time."""

    def __repr__(self) -> str:
        return repr(self.settings)

    @property
    def graph_age(self) -> int | None:
        """Updates of the rows since the graph's build started; None: there is no graph."""
        return None if self.graph is None else self._step() - self.graph.step

    has_graph = True

    def budget(self, num_classes: int) -> int:
        return self.settings.budget(num_classes)

    def select(self, labels: Ids, num_classes: int, step: int) -> ActiveClasses:
        """Return the active classes for the labels [B] (of all ranks), all in numbers of the live classes. Except
        with "auto" it builds a missing graph; with ranks, which would have to build together, it raises InvalidArgument
        instead. If the graph is divided among ranks it is collective, and returns ids of the rank's own classes
        (``graph_by_neighbour.py``)."""
        budget = self.budget(num_classes)
        if budget >= num_classes:
            return ActiveClasses(num_classes)
        labels_P = np.unique(labels)
        self._record(len(labels_P), budget)
        seed, near = self.settings.seed, self.settings.near
        graph = self._graph_in_use() if max(budget, len(labels_P)) < num_classes else None
        if isinstance(graph, OwnNeighbours):
            return graph.select(labels_P, max(budget, len(labels_P)), near, seed, step)
        if graph is not None:
            num_near = len(labels_P) + round(near * max(0, budget - len(labels_P)))
            labels = graph.select(labels, num_near, seed=seed, step=step)
        return positives_and_sample(labels, num_classes, budget, seed, step)

    def ranking(self, num_labels: int, num_classes: int) -> Ranking:
        """Return the ranking: the labels, their neighbours, then the permutation."""
        budget = self.budget(num_classes)
        self._record(num_labels, budget)
        takes_all = max(budget, num_labels) >= num_classes
        graph = None if takes_all else self._graph_in_use()
        return Ranking(self.settings.seed, graph, self.settings.near)

    def _graph_in_use(self) -> NeighbourTable | OwnNeighbours | None:
        """Return the graph to select by, as :meth:`select` says."""
        self._drop_graph_of_others()
        if self.graph is None and not self._begins_at_random:
            if self._ranks is not None:
                raise InvalidArgument(
                    f"table {self._table.spec.name!r} has no graph yet, and ranks build it together: train a step, or "
                    "call head.rebuild_graph() on every rank, before this evaluation"
                )
            self.rebuild_graph()
        if self.graph is None or self._parts is None:
            return None if self.graph is None else self.graph.table
        table = self.graph.table
        if self._own is None or self._own[0] is not table:
            self._own = None  # two at a time would take twice its memory
            self._own = (table, OwnNeighbours.of(table, self._parts.link))
        return self._own[1]

    @property
    def _begins_at_random(self) -> bool:
        return self.settings.rebuild == "auto"

    def _record(self, num_labels: int, budget: int) -> None:
        """Count the work of a training step, whose labels are those of all ranks: every rank counts the same."""
        self.enlarged += num_labels > budget
        if self._is_training:
            self._is_training = False
            self._work += num_labels * max(budget, num_labels)

    def prepare(self) -> None:
        """Build or exchange the graph if that is due, before a training step selects.

        Call it once a step, so that its micro-batches share their classes. While a background build runs, ranks
        exchange one number in it.
        """
        step = self._step()
        if self.budget(self._num_classes) >= self._num_classes:
            return
        self._is_training = True
        self._drop_graph_of_others()
        if step == self._prepared:
            return
        if self.settings.rebuild == "background" and self.graph is not None:
            self._adopt_finished()
            if self._is_due and self._pending is None:
                self._start_build()
        elif self._is_due or (self.graph is None and not self._begins_at_random):
            self.rebuild_graph()
        elif self.settings.rebuild == "auto" and self._affordable_builds >= self._backoff:
            self._build_in_time()
        elif isinstance(self.settings.rebuild, int) and (self.graph_age or 0) >= self.settings.rebuild:
            self.rebuild_graph()
        self._warn_of_age()
        self._prepared = step

    def next_epoch(self) -> None:
        """Signal the end of an epoch, after which the graph is due, unless it is rebuilt by steps. Collective."""
        self._is_due = not isinstance(self.settings.rebuild, int)

    def rebuild_graph(self) -> None:
        """Build the graph now, from the current rows. Collective."""
        self.cancel()
        building = self._new_building()

        def build() -> NeighbourTable:
            building.run(self._source.rows(self.live_classes, self._step()), self.settings.k, self.on_progress)
            return building.result.result()

        self._install(built_for_all(self._ranks, build), building.step)

    def follow(self, live_classes: LiveClasses, added: Ids) -> None:
        """Continue with other live classes, of which ``added`` are new and already have rows. Collective.

        Retired classes leave every list at once. Each new one gets its nearest classes, and comes first in their lists
        until the next build. A background build, being of other classes, is restarted. Costs O(C·k), and with new
        classes a pull of all rows on rank 0, 2·N·C·D operations and 8·N·k bytes to the ranks. If that pull fails the
        graph is dropped, and the next training step builds another: the classes live already.
        """
        before, self.live_classes = self.live_classes, live_classes
        if self._pending is not None:
            self.cancel()
            self._is_due = True
        graph = self.graph
        if graph is None or graph.classes != before.fingerprint:
            return
        bounds = None if self._parts is None or graph.table.total is None else self._parts.bounds(live_classes)
        table = renumbered(graph.table, before, live_classes, bounds)
        if len(added):
            new = live_classes.numbers(added)
            try:
                nearest = self._nearest(new)
            except (GeartrainError, MemoryError) as exc:
                logger.warning(
                    "table %r: cannot find the nearest classes of new ones; the next step builds another graph: %s",
                    self._table.spec.name,
                    exc,
                )
                self._lose_graph()
                return
            table = with_new(table, new, nearest.reshape(len(new), -1))
        self.graph = Graph(table, graph.version + 1, graph.step, live_classes.fingerprint)

    def _nearest(self, numbers: Ids) -> Ids:
        rows, ranks, found = TableRows(self._table, self.live_classes), self._ranks, np.empty(0, np.int64)

        def search() -> Ids:
            return nearest_classes(rows.read_numbers, rows.num_rows, rows.dim, numbers, self.settings.k).ravel()

        if ranks is None:
            return search()
        found = ranks.first_then_others(search, lambda: found)
        nearest: Ids = ranks.array_from_first(found)
        return nearest

    def _drop_graph_of_others(self) -> None:
        """Divide a given graph (:meth:`graph_from_bytes`) among ranks; drop one of other live classes."""
        graph = self.graph
        if graph is None:
            return
        if graph.classes == self.live_classes.fingerprint:
            if self._parts is not None and graph.table.total is None:
                self.graph = replace(graph, table=self._parts.cut(graph.table, self.live_classes))
        else:
            logger.warning(
                "table %r: graph version %d has other live classes than the head; the next step builds another one",
                self._table.spec.name,
                graph.version,
            )
            self._lose_graph()

    def _lose_graph(self) -> None:
        """Drop the graph; the next training step builds another one."""
        self.graph, self._prepared, self._is_due = None, None, True

    def cancel(self) -> None:
        """Cancel a background build; the graph in use stays, and is due again. Collective."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending, self._ending = None, self._pending
            self._is_due = True

    def report_progress(self, progress: OnPairs) -> None:
        self.on_progress = progress

    def state(self) -> dict[str, Any]:
        """Return the facts of the graph in use, as JSON values of the head's state; :meth:`graph_to_bytes` returns
        itself."""
        names = dict(zip(("version", "step", "classes"), self._identity, strict=True))
        is_due = self._is_due or self._pending is not None
        return {**names, "is_due": is_due, "work": self._work, "patience": self._backoff}

    @property
    def _identity(self) -> tuple[int, int, int]:
        """Version, step and live classes of the graph in use; zeros if there is none."""
        return (self.graph.version, self.graph.step, self.graph.classes) if self.graph else (0, 0, 0)

    def resume(self, state: Mapping[str, Any] | None, live_classes: LiveClasses) -> None:
        """Continue with the graph of :meth:`state` if it is here, else log that the next step builds another one."""
        self.live_classes = live_classes
        if state is None:
            return
        self.cancel()
        self._prepared = None
        self._is_due = bool(state["is_due"])
        self._work, self._backoff = int(state.get("work", 0)), int(state.get("patience", 1))
        self._built_at = time.monotonic()
        saved = (int(state["version"]), int(state["step"]), int(state.get("classes", 0)))
        if self._identity == saved:
            return
        self.graph = None
        if saved[0]:
            self._is_due = True
            logger.warning(
                "table %r: graph version %d of step %d is not in this process; the next step builds one from the rows "
                "of step %d",
                self._table.spec.name,
                *saved[:2],
                self._step(),
            )

    @property
    def _listed(self) -> range:
        """Classes whose lists are here, if they live."""
        return range(self.live_classes.num_classes) if self._parts is None else self._parts.classes

    def graph_state(self) -> dict[str, Any]:
        """Return the graph in use (version 0: none): JSON values, and ``lists`` [C, k] by class, of which each rank has
        its part. 4·C·k / R bytes; nothing is sent."""
        self._drop_graph_of_others()
        num_classes, table = self.live_classes.num_classes, None if self.graph is None else self.graph.table
        k = self.settings.k if table is None else table.k
        lists_LK = torch.from_numpy(lists_by_class(table, self.live_classes, self._listed, k))
        return {
            "lists": lists_LK if self._parts is None else RowsOfRank(lists_LK, self._listed.start, num_classes),
            "k": k,
            **dict(zip(("version", "step", "classes"), self._identity, strict=True)),
            "num_classes": num_classes,
            "retired_runs": self.live_classes.retired_runs.tolist(),
        }

    def load_graph(self, state: Mapping[str, Any], own: Callable[[Any, range], Tensor]) -> None:
        """Use the graph of :meth:`graph_state`, saved by any number of ranks; ``own`` reads the lists of some classes.
        Raises SpecMismatch for another C."""
        self._require_size(int(state["num_classes"]))
        self.graph = None
        if not state["version"]:
            return
        live, k = LiveClasses(int(state["num_classes"]), state["retired_runs"]), int(state["k"])
        lists_LK = own(state["lists"], self._listed).numpy()
        table = table_of_lists(lists_LK, live, self._listed, k, is_part=self._parts is not None)
        self.graph = Graph(table, int(state["version"]), int(state["step"]), int(state["classes"]))

    def graph_to_bytes(self) -> bytes | None:
        """Return the graph in use as the bytes of a safetensors file; None if there is none. If it is divided among
        ranks this is collective, and rank 0 gets the bytes of the whole, the others None: any number of ranks loads
        them. ``geartrain.save`` and ``head.sharded_rows()`` save it in parts."""
        if self.graph is None:
            return None
        table: NeighbourTable | None = self.graph.table
        if self._parts is not None and self.graph.table.total is not None:
            table = self._parts.whole(self.graph.table)
        if table is None:
            return b""
        return state_to_bytes(
            {
                "offsets": torch.from_numpy(table.offsets),
                "neighbours": torch.from_numpy(table.neighbours),
                "k": table.k,
                "version": self.graph.version,
                "step": self.graph.step,
                "classes": self.graph.classes,
                "num_classes": self._table.spec.num_rows,
            }
        )

    def graph_from_bytes(self, data: bytes) -> None:
        """Use the graph that :meth:`graph_to_bytes` returned. Raises InvalidArgument, and SpecMismatch for another C.

        Collective.
        """
        state = state_from_bytes(data)
        try:
            arrays = state["offsets"].numpy(), state["neighbours"].numpy()
            table = NeighbourTable(*arrays, int(state["k"]))
            graph = Graph(table, int(state["version"]), int(state["step"]), int(state.get("classes", 0)))
            num_classes = int(state.get("num_classes", table.num_classes))
        except (KeyError, TypeError, AttributeError) as exc:
            raise InvalidArgument(f"{len(data)} bytes are not a graph that graph_to_bytes wrote: {exc!r}") from exc
        self._require_size(num_classes)
        self.graph = graph

    def _require_size(self, num_classes: int) -> None:
        if num_classes != self.live_classes.num_classes:
            raise SpecMismatch(
                f"the saved graph is of {num_classes} classes, table {self._table.spec.name!r} has "
                f"{self.live_classes.num_classes}; give the one that was saved with it"
            )

    @property
    def _num_classes(self) -> int:
        return self.live_classes.num_live_classes

    @property
    def _affordable_builds(self) -> float:
        """Number of builds, of C²·D operations, that take ``SHARE`` of the steps since the last one, of 6·P·A·D
        each."""
        return SHARE * 6 * self._work / self._num_classes**2

    def _build_in_time(self) -> None:
        """Build; if that takes too large a share of the time, make builds rarer. With ranks one exchange."""
        began = time.monotonic()
        trained = began - self._built_at
        self.rebuild_graph()
        seconds = self._built_at - began
        is_slow = seconds > max(SHORT_SECONDS, SHARE * trained)
        if is_slow if self._ranks is None else self._ranks.agree(is_slow or not self._ranks.acts):
            self._backoff *= 2

    def _warn_of_age(self) -> None:
        if self._has_warned or self.settings.rebuild not in ("epoch", "background") or self._affordable_builds < OLD:
            return
        self._has_warned = True
        logger.warning(
            "table %r: the graph of KNN softmax is %s updates old, time enough for %d in a tenth of it; call "
            "head.next_epoch() after each pass over the data, or say rebuild='auto' instead of %r",
            self._table.spec.name,
            self.graph_age,
            self._affordable_builds,
            self.settings.rebuild,
        )

    def _start_build(self) -> None:
        """Start a build in the background."""
        self._is_due = False
        self._pending = building = self._new_building()
        if self._ranks is None or self._ranks.acts:
            rows = self._source.rows(self.live_classes, self._step(), beside_training=True)
            building.start(rows, self.settings.k, self.on_progress)

    def _new_building(self) -> GraphBuild:
        after, self._ending = self._ending, None
        return GraphBuild(self._step(), after)

    def _adopt_finished(self) -> None:
        """Use a graph built in the background, if the ranks that build have finished."""
        if (building := self._pending) is None:
            return
        done = building.result.done()
        if self._ranks is not None:
            done = self._ranks.agree(done or not self._ranks.acts)
        if done:
            self._pending = None
            is_due = self._is_due
            self._install(built_for_all(self._ranks, building.result.result), building.step)
            self._is_due = is_due  # of an epoch that ended meanwhile

    def _install(self, table: NeighbourTable, step: int) -> None:
        version = 1 if self.graph is None else self.graph.version + 1
        self.graph = Graph(table, version, step, self.live_classes.fingerprint)
        self._is_due = False
        self._work, self._built_at = 0, time.monotonic()
