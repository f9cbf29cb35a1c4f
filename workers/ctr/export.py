"""Export of a run of ``geartrain worker ctr`` as a folder to serve: its network as ONNX, and its tables.

config.json     sealed, see :mod:`geartrain.workers.models.saved_model`: kind "clicks", the fields of a sample, the
                kinds of their values (``kinds``), what is looked up for them (``features``), and where (``tables``)
network.onnx    see :mod:`.served_network`
tables/N.safetensors    a table, see :mod:`geartrain.ams.storage.export.mapped_rows`
examples.json   samples to show to people; may be absent, see :mod:`.samples.examples`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from geartrain.ams.client.snapshots.follower import spec_of_rows
from geartrain.ams.storage.export.mapped_rows import write_mapped
from geartrain.ams.storage.snapshot.compaction import rows_of_table
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant, Ids, Rows, TableSpec
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.ctr.designs import IMAGE, Design, SampleLayout
from geartrain.workers.ctr.samples.examples import FILE
from geartrain.workers.ctr.samples.features import HISTORY, HISTORY_ITEMS, SampleFeature
from geartrain.workers.ctr.samples.images import ItemImages
from geartrain.workers.ctr.samples.kinds import kinds_to_json
from geartrain.workers.ctr.samples.sources import load_samples
from geartrain.workers.ctr.served_network import write_network
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.data.packages import Say
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.state import JobState, best_snapshot
from geartrain.workers.models.export import next_version
from geartrain.workers.models.saved_model import seal_folder

KIND = "clicks"
NETWORK = "network.onnx"


def export_clicks(
    run: Path | Snapshot, out: Path, *, version: int | None = None, cache: Path, say: Say, examples: bool = True
) -> dict[str, Any]:
    """Replace the folder ``out``, as a whole, by the model of a snapshot; return its config.

    Args:
        run: A snapshot; or the folder of a run, of which the best snapshot is exported.
        out: The folder to serve.
        version: Number of the model; None: the step of the training.
        cache: Folder of downloaded samples.
        say: Receives progress lines.
        examples: Whether to export examples of the samples.

    Raises ConfigError, SnapshotDamaged, InvalidArgument, OSError; then the old folder stays.
    """
    next_version(out)  # raises if other files are there
    snapshot = run if isinstance(run, Snapshot) else best_snapshot(read_run(run).snapshots)
    state = JobState.read(snapshot, ClickTrainer.job, ClickTrainer.recipe_class)
    design = Design(state.recipe, SampleLayout.from_json(state.data))
    network = design.network()
    network.load_state_dict(state.tensors["network"])
    uses = {name for feature in design.served for name in feature.of}
    kinds = design.layout.schema.kinds
    images = load_samples(state.data["source"], cache, say, kinds).images if HISTORY_ITEMS in uses else None
    longest = state.recipe.history if design.is_unrolled else None
    with replacing_folder(out) as staging:
        config = {
            "kind": KIND,
            "model": state.recipe.model,
            **about(snapshot, state, version),
            "fields": list(design.layout.fields),
            "items": list(design.layout.schema.item),
            "kinds": kinds_to_json(kinds),
            "history": state.recipe.history if state.recipe.reads_events and uses & {HISTORY, HISTORY_ITEMS} else 0,
            "longest": longest,
            "features": [feature.to_json() for feature in design.served],
            "parity": write_network(network, design.served, staging / NETWORK, longest=longest),
            "tables": write_tables(
                staging, snapshot, state.progress.table, design.features, () if images is None else [images]
            ),
        }
        write_examples(staging, state, examples)
        seal_folder(staging, config)
    return config


def write_examples(staging: Path, state: JobState, wanted: bool) -> None:
    """Write the examples that the job keeps of its samples, if there are some and they are ``wanted``."""
    if wanted and FILE in state.files:
        (staging / FILE).write_bytes(state.files[FILE])


def about(snapshot: Snapshot, state: JobState, version: int | None) -> dict[str, Any]:
    """Return the part of config.json about the training."""
    return {
        "version": state.progress.step if version is None else version,
        "created": snapshot.manifest.created,
        "training": {
            "job": state.progress.table,
            "step": state.progress.step,
            "snapshot": snapshot.name,
            "moment": snapshot.manifest.moment_id,
        },
    }


def write_tables(
    staging: Path,
    snapshot: Snapshot,
    job: str,
    features: Iterable[SampleFeature],
    images: Sequence[ItemImages] = (),
) -> list[dict[str, Any]]:
    """Write the tables of the features and the images; return their part of config.json."""
    names = dict.fromkeys(feature.table for feature in features)
    specs = {str(fields["name"]): fields for fields in snapshot.manifest.tables}
    folder = staging / "tables"
    folder.mkdir()
    mapped: list[dict[str, Any]] = []

    def write(name: str, spec: TableSpec, num_rows: int, blocks: Iterable[tuple[Ids, Rows]]) -> None:
        file = folder / f"{len(mapped)}.safetensors"
        count = write_mapped(file, spec, num_rows, blocks)
        mapped.append({"table": name, "file": f"tables/{file.name}", "rows": count, "spec": spec.to_dict()})

    for name in names:
        spec = spec_of_rows(specs[f"{job}/{name}"])
        num_rows, blocks = rows_of_table(snapshot, spec.name)
        write(name, spec, num_rows, ((block["ids"], block["rows"]) for block in blocks))
    for given in images:
        spec = TableSpec(name=IMAGE, dim=given.dim, optimizer=SGD(1.0), initializer=Constant(0.0))
        write(IMAGE, spec, len(given.items), [(given.items, given.pixels)])
    return mapped
