"""One of two workers that train DeepFM on MovieLens-100K, each at its own speed: what sparse_modes.py runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import geartrain as gt
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.metrics import auc
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import PADDING, split
from geartrain.workers.ctr.samples.movielens import find_movielens, read_movielens
from geartrain.workers.data.streams import JointOrder

WORKERS = 2


@dataclass(frozen=True)
class Task:
    """A training."""

    mode: str
    """"async", "sync" or "ssp"."""
    seed: int
    batch: int
    """Samples of an update: of one worker's, or of both together where they step together."""
    updates: int
    slow_seconds: float
    """Added to each step of the second worker."""
    staleness: int
    cache: str
    scheduler: str
    meeting: str
    """A file that ranks meet by."""


def work(rank: int, task: Task, taken: Synchronized[int], start: Any, results: Any) -> None:
    """Train until all updates are made; the first worker then says how good the model is."""
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    is_sync = task.mode == "sync"
    if is_sync:
        dist.init_process_group("gloo", init_method=f"file://{task.meeting}", rank=rank, world_size=WORKERS)
    recipe = CtrRecipe(seed=task.seed, batch_size=task.batch, steps=task.updates)
    train, test = split(read_movielens(find_movielens(Path(task.cache), print)), recipe.split, recipe.seed)
    design = Design(recipe, layout_of(train))
    order = JointOrder(len(train), recipe.batch_size, recipe.seed)
    with gt.connect(task.scheduler) as cluster:
        name = f"{task.mode}-{task.seed}"
        mode: Any = gt.SSP(task.staleness, worker=f"worker {rank}") if task.mode == "ssp" else task.mode
        members = [gt.Field(one, dim, pooling="mean", padding_id=PADDING) for one, dim in design.dims.items()]
        rows_by = gt.Adam(recipe.row_lr, weight_decay=recipe.row_weight_decay)
        fields = gt.EmbeddingGroup(cluster, name, members, optimizer=rows_by, mode=mode, reuse=True)
        network = design.network()
        dense_mode: Any = "sync" if is_sync else "async"
        dense = gt.attach(
            network, cluster, name=f"{name}/dense", optimizer=gt.Adam(recipe.lr), mode=dense_mode, reuse=True
        )
        rows = gt.RowOptimizer(fields)
        start.wait()
        began = time.monotonic()
        for update in _updates(task, taken, is_sync):
            factor = recipe.rate_factor(update, task.updates)
            dense.param_groups[0]["lr"] = recipe.lr * factor
            for group in rows.param_groups:
                group["lr"] = recipe.row_lr * factor
            indices = order.indices(update).numpy()
            if is_sync:
                indices = np.array_split(indices, WORKERS)[rank]
            loss = network(fields(design.ids(train, indices)), torch.from_numpy(train.clicks[indices]))
            loss.backward()
            rows.step()
            dense.step(samples=len(indices))
            rows.zero_grad()
            dense.zero_grad()
            if rank == 1:
                time.sleep(task.slow_seconds)
        ended = time.monotonic()
        if fields.worker_steps is not None:
            fields.worker_steps.leave()
        start.wait()  # now all updates are made
        if rank == 0:
            dense.refresh()
            network.eval()
            with torch.no_grad():
                parts = [np.arange(at, min(at + 4096, len(test))) for at in range(0, len(test), 4096)]
                logits = [network(fields(design.ids(test, part))) for part in parts]
            results.put((rank, began, ended, auc(torch.cat(logits).numpy(), test.clicks)))
        else:
            results.put((rank, began, ended, float("nan")))
        start.wait()
    if is_sync:
        dist.destroy_process_group()


def _updates(task: Task, taken: Synchronized[int], is_sync: bool) -> Any:
    """Numbers of updates: all of them for each rank of a joint step, else each for whoever takes it."""
    if is_sync:
        yield from range(task.updates)
        return
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= task.updates:
            return
        yield number
