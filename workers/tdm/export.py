"""Export of a run of ``geartrain worker tdm`` to a folder to serve: its network as ONNX, its tables, and the tree.

As :mod:`geartrain.workers.ctr.export`, kind "tree", with ``tree.safetensors``: the items [K] from left to right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.ctr.export import NETWORK, about, write_examples, write_tables
from geartrain.workers.ctr.samples.click_samples import SampleSchema
from geartrain.workers.ctr.samples.features import HISTORY, SampleFeature
from geartrain.workers.ctr.samples.kinds import kinds_to_json
from geartrain.workers.ctr.served_network import write_network
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.state import JobState, newest_snapshot
from geartrain.workers.models.export import next_version
from geartrain.workers.models.saved_model import seal_folder, write_arrays
from geartrain.workers.tdm.trainer import NODE, NODE_WEIGHT, TreeTrainer, dims_of

KIND = "tree"
TREE = "tree.safetensors"


def export_tree(
    run: Path | Snapshot, out: Path, *, version: int | None = None, examples: bool = True
) -> dict[str, Any]:
    """Replace the folder ``out`` atomically by the model of a snapshot; return its config.

    ``run``, ``examples`` and errors are as in :func:`geartrain.workers.ctr.export.export_clicks`.
    """
    next_version(out)  # raises if other files exist
    snapshot = run if isinstance(run, Snapshot) else newest_snapshot(read_run(run).snapshots)
    state = JobState.read(snapshot, TreeTrainer.job, TreeTrainer.recipe_class)
    fields, schema = state.data["fields"], SampleSchema.from_json(state.data["schema"])
    kinds = {name: schema.kinds[name] for name in fields}
    kinds[HISTORY] = replace(schema.kinds[schema.item[0]], is_list=True, fill=None)
    saved, recipe = state.tensors["tdm"], state.recipe
    items = saved["_extra_state"]["items"]
    dims = dims_of(fields, recipe.dim)
    network = DeepFM(dims, recipe.hidden, dropout=recipe.dropout)
    own = "network."
    network.load_state_dict({name.removeprefix(own): saved[name] for name in saved if name.startswith(own)})
    of = {NODE_WEIGHT: NODE}
    table = {HISTORY: NODE}
    features = [
        SampleFeature(name=name, dim=dim, of=(of.get(name, name),), table=table.get(name, name))
        for name, dim in dims.items()
    ]
    with replacing_folder(out) as staging:
        write_arrays(staging / TREE, {"items": items.numpy()})
        config = {
            "kind": KIND,
            **about(snapshot, state, version),
            "fields": list(fields),
            "kinds": kinds_to_json(kinds),
            "history": recipe.history,
            "beam": recipe.beam,
            "num_items": len(items),
            "features": [feature.to_json() for feature in features],
            "parity": write_network(network, features, staging / NETWORK),
            "tables": write_tables(staging, snapshot, state.progress.table, features),
        }
        write_examples(staging, state, examples)
        seal_folder(staging, config)
    return config
