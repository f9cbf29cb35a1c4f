"""The API pages: one for each group of public names, each name rendered by mkdocstrings from its docstring."""

from __future__ import annotations

from dataclasses import dataclass

import geartrain


@dataclass(frozen=True)
class ApiPage:
    """A page of public names, and of classes that they take and return; without names, of those of a public module."""

    name: str
    title: str
    homes: tuple[str, ...]
    """Beginnings of the modules whose public names belong here; the first page that fits takes a name."""
    returned: tuple[str, ...] = ()
    """Classes that no public name is for, but that users hold in their hands."""


PAGES = (
    ApiPage(
        "heads",
        "Class heads",
        (
            "geartrain.bridge.head",
            "geartrain.bridge.rows.joint",
            "geartrain.bridge.rows.optimizer",
            "geartrain.ams.programs",
        ),
        (
            "geartrain.ams.programs.selection.Selection",
            "geartrain.ams.programs.selection.ActiveClasses",
            "geartrain.bridge.head.loss.margins.margin.Margin",
            "geartrain.bridge.head.loss.margins.margin.AdaptiveMargin",
            "geartrain.bridge.head.loss.margins.margin.NegativesMargin",
            "geartrain.bridge.head.loss.margins.margin.MarginBatch",
            "geartrain.bridge.head.loss.margins.margin.TargetLogits",
        ),
    ),
    ApiPage(
        "embeddings",
        "Embeddings of sparse features",
        ("geartrain.bridge.embedding", "geartrain.ams.values.admission"),
        ("geartrain.bridge.embedding.group_follower.GroupFollower", "geartrain.ams.values.expiry.rules.RowBlock"),
    ),
    ApiPage("retrieval", "Retrieval by a tree", ("geartrain.bridge.retrieval",)),
    ApiPage(
        "models",
        "Click models",
        (),
        (
            "geartrain.models.DeepFM",
            "geartrain.models.WideDeep",
            "geartrain.models.DSSM",
            "geartrain.models.DIN",
            "geartrain.models.DIEN",
            "geartrain.models.CrossMedia",
            "geartrain.models.ClickModel",
            "geartrain.models.AUGRU",
            "geartrain.models.Dice",
        ),
    ),
    ApiPage(
        "optimizers", "Optimizers and first values", ("geartrain.ams.values.specs", "geartrain.ams.values.optimizers")
    ),
    ApiPage(
        "clusters",
        "Clusters and tables",
        ("geartrain.ams", "geartrain.launch.hosting"),
        (
            "geartrain.ams.client.cluster.Cluster",
            "geartrain.ams.client.table.Table",
            "geartrain.ams.client.snapshots.follower.TableFollower",
            "geartrain.ams.values.specs.TableSpec",
            "geartrain.ams.client.snapshots.snapshot.PendingSnapshot",
            "geartrain.ams.storage.snapshot.folder.Snapshot",
            "geartrain.ams.client.data_streams.DataStreams",
            "geartrain.ams.graph.client.calls.GraphCalls",
            "geartrain.ams.client.writes.Write",
        ),
    ),
    ApiPage(
        "operations",
        "Roles in a program, clusters on Ray",
        (),
        ("geartrain.ops.Role", "geartrain.ops.serve_metrics", "geartrain.ray.cluster", "geartrain.ray.RayCluster"),
    ),
    ApiPage(
        "samples",
        "Samples",
        ("geartrain.workers.samples",),
        (
            "geartrain.workers.samples.batches.SampleBatch",
            "geartrain.workers.samples.leased.LeasedSamples",
            "geartrain.workers.samples.trees.writing.TreeReport",
        ),
    ),
    ApiPage(
        "parallel",
        "Parallel training",
        ("geartrain.bridge.parallel",),
        (
            "geartrain.bridge.parallel.mesh.Mesh",
            "geartrain.bridge.parallel.parallel_model.ParallelModel",
            "geartrain.bridge.parallel.split.logits.SplitLogits",
            "geartrain.bridge.parallel.plan.plan.Plan",
            "geartrain.bridge.parallel.overlap.trace.TracedStep",
            "geartrain.bridge.parallel.overlap.trace.RankTimes",
        ),
    ),
    ApiPage(
        "large-batches",
        "Optimizers and a schedule for large batches",
        ("geartrain.bridge.optim",),
        ("geartrain.bridge.optim.step_batches.StepBatches",),
    ),
    ApiPage(
        "gears",
        "Dense modules and slow gears",
        ("geartrain.bridge.dense", "geartrain.bridge.gear"),
        ("geartrain.bridge.dense.dense_table.DenseTable",),
    ),
    ApiPage(
        "state",
        "State and data",
        ("geartrain",),
        ("geartrain.workers.models.trained_model.TrainedModel", "geartrain.workers.data.streams.StreamReader"),
    ),
)
NOT_ON_THESE_PAGES = {"errors", "__version__"}
"""The errors have a page of their own; the version is a text."""


def page_of(home: str) -> ApiPage:
    """The page on which names of the module ``home`` stand."""
    return next(page for page in PAGES if home.startswith(page.homes))


def render() -> dict[str, str]:
    """Return the text of each page by its place in the site."""
    names: dict[ApiPage, list[str]] = {page: [] for page in PAGES}
    for name in geartrain.__all__:
        if name not in NOT_ON_THESE_PAGES:
            names[page_of(geartrain._HOMES[name])].append(name)
    pages = {f"reference/api/{page.name}.md": _page(page, found) for page, found in names.items()}
    pages["reference/api/index.md"] = _index(names)
    return pages


def _page(page: ApiPage, names: list[str]) -> str:
    parts = [f"# {page.title}", "```python\nimport geartrain as gt\n```"]
    parts += [f"::: geartrain.{name}" for name in sorted(names, key=str.lower)]
    if not names:
        parts += [f"::: {path}" for path in page.returned]
    elif page.returned:
        parts.append("## What these take and return")
        parts += [f"::: {path}\n    options:\n      heading_level: 3" for path in page.returned]
    return "\n\n".join(parts) + "\n"


def _index(names: dict[ApiPage, list[str]]) -> str:
    lines = ["# API", "", "Every public name of `import geartrain as gt`.", ""]
    for page, found in names.items():
        shown = found or [path.removeprefix("geartrain.") for path in page.returned]
        links = [f"[{name}]({page.name}.md#geartrain.{name})" for name in sorted(shown, key=str.lower)]
        lines += [f"**[{page.title}]({page.name}.md)**: {' · '.join(links)}", ""]
    return "\n".join([*lines, "**[Errors](../errors.md)**: `gt.errors`, the whole tree.", ""])
