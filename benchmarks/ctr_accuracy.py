"""AUC of DeepFM on held-out samples, against the same network over torch's own embeddings.

MovieLens-100K, held out at random and by time, three seeds; with ``--full`` three million flights, May and June held
out. Downloads go to ``.cache``. The ratio is that of the AUCs: the target is torch's less 0.002.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from _common import result
from _torch_clicks import both_aucs

from geartrain.launch.bench import Result
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.samples.sources import load_samples

SEEDS = range(3)
LESS = 0.002


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench ctr``."""
    for data, split in (("movielens", "random"), ("movielens", "time"), ("flights", "time")):
        if data == "movielens" or full:
            yield _case(data, split)


def _case(data: str, split: str) -> Result:
    samples = load_samples(data, Path(".cache"), print)
    recipe = recipe_for(data, model="deepfm", split=split)
    found = np.array([both_aucs(samples, replace(recipe, seed=seed)) for seed in SEEDS])
    print(f"{data}, {split}: ours and torch's by seed {found.round(4).tolist()}", flush=True)
    ours, theirs = found.mean(0)
    case, rival = f"AUC of DeepFM, {data}, {split}, {len(SEEDS)} seeds", "nn.EmbeddingBag, SparseAdam, the same network"
    return result(case, ours, rival, theirs, "AUC", target=(theirs - LESS) / theirs, more_is_better=True)
