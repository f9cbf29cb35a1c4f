"""``geartrain worker tdm``: what users liked in, a tree of items and its recall out."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.ams.values.specs import Ids
from geartrain.bridge.checkpoint.saving import save
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.retrieval.item_tree import ItemTree
from geartrain.bridge.retrieval.tdm import TDM
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.workers.atomic import write_json
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples
from geartrain.workers.ctr.samples.sources import load_samples
from geartrain.workers.data.streams import JointOrder
from geartrain.workers.job.folder import put_aside, require_new_run, require_one_process, sole_trainer
from geartrain.workers.job.interruption import interruption
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.options import JobResult
from geartrain.workers.job.report import versions
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loggers.registry import open_loggers, require_loggers
from geartrain.workers.tdm.liked import HISTORY, Liked, liked_of, recall
from geartrain.workers.tdm.recipe import CUTS, TdmRecipe

NODE, NODE_WEIGHT = "node", "node_weight"
_SHOW_EVERY = 20
_USERS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class TdmOptions:
    """Where and how a training of a tree runs."""

    out: Path
    """Run folder."""
    recipe: TdmRecipe
    data: str | None = None
    """As ``--data`` of a click model; the samples need users, items and times."""
    cache: Path = Path(".cache")
    """Where what is downloaded is kept."""
    overwrite: bool = False
    """Start over where ``out`` holds a run already."""
    scheduler: str | None = None
    """host:port of a cluster's scheduler; by default one shard is embedded in this process."""
    loggers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        require_loggers(self.loggers)


def train_tree(options: TdmOptions, console: Console) -> JobResult:
    """Train, make the tree anew, train on, measure the recall and save. Raises ConfigError before anything is written.

    It takes no snapshots: one that is interrupted leaves nothing.
    """
    require_one_process("tdm")
    if not options.overwrite:
        require_new_run(options.out)
    with ExitStack() as stack:
        stack.enter_context(sole_trainer(options.out))
        samples = load_samples(options.data, options.cache, lambda line: console.print(line, highlight=False))
        liked = liked_of(samples, options.recipe)
        job = f"{options.out.name or 'run'}-{secrets.randbits(32):08x}"
        cluster = stack.enter_context(
            local(num_shards=1) if options.scheduler is None else connect(options.scheduler, stream=f"{job}/rank0")
        )
        stop = stack.enter_context(interruption())
        if options.overwrite:
            put_aside(options.out)
        events = open_loggers(options.loggers, options.out, job, None)
        stack.callback(events.close)
        run = _TreeRun(options, samples, liked, cluster, job, console, events)
        stack.callback(run.drop_rows)
        with stop.in_order(cluster):
            for tree in range(1 + options.recipe.rebuilds):
                if not run.train(tree, stop):
                    console.print(f"Stopped at step {run.step}; nothing is saved", highlight=False)
                    return JobResult(False, None, run.step, is_saved=False)
            return JobResult(True, run.report(), run.step)


class _TreeRun:
    """The pieces of one training."""

    def __init__(
        self,
        options: TdmOptions,
        samples: ClickSamples,
        liked: Liked,
        cluster: Cluster,
        job: str,
        console: Console,
        events: Loggers,
    ) -> None:
        self._options = options
        self._liked = liked
        self._cluster = cluster
        self._console = console
        self._events = events
        self.step = 0
        self._seconds = 0.0
        self._recalls: list[dict[str, Any]] = []
        recipe = options.recipe
        torch.manual_seed(recipe.seed)
        dims = dict.fromkeys((*liked.user_fields, HISTORY, NODE), recipe.dim) | {NODE_WEIGHT: 1}
        network = DeepFM(dims, recipe.hidden, dropout=recipe.dropout)
        members = [Field(name, recipe.dim, pooling="mean", padding_id=PADDING) for name in liked.user_fields]
        members += [
            Field(NODE, recipe.dim, pooling=None),
            Field(NODE_WEIGHT, 1, pooling=None),
            Field(HISTORY, table=NODE, pooling="mean"),
        ]
        optimizer = Adam(recipe.row_lr, weight_decay=recipe.row_weight_decay)
        fields = EmbeddingGroup(cluster, job, members, optimizer=optimizer, seed=recipe.seed)
        first = ItemTree(first_order(samples, liked.items))
        self._tdm = TDM(first, fields, network, node=[NODE, NODE_WEIGHT], negatives=recipe.negatives)
        self._rows = RowOptimizer(fields)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=recipe.lr)
        self._order = JointOrder(len(liked.train), recipe.batch_size, recipe.seed)
        counts = f"{len(liked.train):,} clicks on {len(liked.items):,} items"
        self._say(f"Training a tree of {first.depth} levels on {counts}; {len(liked.users):,} users are asked")

    def train(self, tree: int, stop: Any) -> bool:
        """Train with the first tree, or make the next one first; False if ``stop`` ended it before."""
        recipe = self._options.recipe
        if tree:
            self._tdm.rebuild()
        end = self.step + recipe.steps
        with LiveLine(self._console, recipe.steps * (1 + recipe.rebuilds)) as line:
            window, since = time.perf_counter(), self.step
            while self.step < end:
                if stop():
                    return False
                loss = self._one_step()
                if self.step % _SHOW_EVERY == 0 or self.step == end:
                    seconds = max(time.perf_counter() - window, 1e-9)
                    rate = (self.step - since) * recipe.batch_size / seconds
                    numbers = {"loss": float(loss), "samples_per_second": rate}
                    self._events.scalars("train", numbers, self.step)
                    line.show(self.step, numbers)
                    window, since = time.perf_counter(), self.step
        self._measure(tree)
        return True

    def _one_step(self) -> torch.Tensor:
        started, recipe, train = time.perf_counter(), self._options.recipe, self._liked.train
        factor = recipe.rate_factor(self.step)
        self._optimizer.param_groups[0]["lr"] = recipe.lr * factor
        for group in self._rows.param_groups:
            group["lr"] = recipe.row_lr * factor
        indices = self._order.indices(self.step).numpy()
        items = train.fields[train.schema.item[0]][indices]
        loss: torch.Tensor = self._tdm(self._liked.ids(train, indices), items)
        self._optimizer.zero_grad()
        self._rows.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._rows.step()
        self.step += 1
        self._seconds += time.perf_counter() - started
        return loss.detach()

    def _measure(self, tree: int) -> None:
        found = self._recalls_of(self._by_beam(self._options.recipe.beam))
        self._recalls.append({"tree": tree, "step": self.step, **found})
        self._events.scalars("held_out", found, self.step)
        self._say(f"Tree {tree + 1}: {_shown(found)}")

    def _recalls_of(self, lists: Ids) -> dict[str, float]:
        return {f"recall_{cut}": recall(lists, self._liked, cut) for cut in CUTS}

    def _by_beam(self, beam: int) -> Ids:
        """The lists [U, beam] of the search, with room for what was seen."""
        beam = min(beam, len(self._liked.items))
        lists = [
            self._tdm.retrieve(self._liked.ids(self._liked.users, part), k=beam, beam=beam)[0].numpy()
            for part in self._parts()
        ]
        return np.concatenate(lists)

    def _by_all(self) -> Ids:
        """The lists [U, K] by the scores of all items."""
        items = self._liked.items
        scores = [self._tdm.scores(self._liked.ids(self._liked.users, part), items) for part in self._parts()]
        order: Ids = torch.cat(scores).argsort(1, descending=True).numpy()
        return items[order]

    def _parts(self) -> list[Ids]:
        everyone = np.arange(len(self._liked.users))
        return np.split(everyone, range(_USERS_AT_ONCE, len(everyone), _USERS_AT_ONCE))

    def report(self) -> dict[str, Any]:
        """Compare the search with looking at all items and with the most popular; save the model."""
        out, liked, recipe = self._options.out, self._liked, self._options.recipe
        popular = np.broadcast_to(liked.popular(), (len(liked.users), len(liked.items)))
        ways = {"every item scored": self._by_all(), "the most popular": popular}
        others = {way: self._recalls_of(lists) for way, lists in ways.items()}
        for way, found in others.items():
            self._say(f"{way[0].upper()}{way[1:]}: {_shown(found)}")
        narrower = max(max(CUTS), recipe.beam // 2)
        beams = {
            beam: {"nodes_scored": nodes_scored(self._tdm.tree, beam), **self._recalls_of(self._by_beam(beam))}
            for beam in sorted({narrower, recipe.beam})
        }
        save(self._tdm, out / "model")
        report = {
            "held_out": {"trees": self._recalls, "beams": beams, "users": len(liked.users), **others},
            "items": len(liked.items),
            "recipe": recipe.to_json(),
            "steps": self.step,
            "train_seconds": self._seconds,
            "versions": versions(torch.device("cpu"), bfloat16=False),
        }
        write_json(out / "report.json", report)
        for beam, found in beams.items():
            scored = f"{found['nodes_scored']:,} nodes scored, of {len(liked.items):,} items"
            self._say(f"Beam {beam}, {scored}: {_shown(found)}")
        self._say(f"Trained in {self._seconds:.0f} s. Model and report are in {out}")
        return report

    def drop_rows(self) -> None:
        """Leave the memory of the shards to others."""
        for part in self._tdm.fields.trained:
            for spec in part.row_keeper.specs():
                self._cluster.drop_table(spec.name)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def nodes_scored(tree: ItemTree, beam: int) -> int:
    """The most nodes that a search looks at: the children of a beam, on each level that has more nodes than it."""
    sizes = [len(tree.slots_at(level)) for level in range(1, tree.depth + 1)]
    return sum(min(2 * beam, size) for size in sizes if size > beam) or len(tree.items)


def _shown(found: dict[str, Any]) -> str:
    return ", ".join(f"recall@{cut} {found[f'recall_{cut}']:.4f}" for cut in CUTS)


def first_order(samples: ClickSamples, items: Ids) -> Ids:
    """The items in the order of the other fields that tell of them, so that those of a kind are neighbours."""
    own, *others = samples.schema.item
    _, first = np.unique(samples.fields[own], return_index=True)
    keys = [samples.fields[name][first] for name in reversed(others)]
    keys = [key if key.ndim == 1 else np.sort(key, 1)[:, -1] for key in keys]
    return items[np.lexsort(keys)] if keys else items
