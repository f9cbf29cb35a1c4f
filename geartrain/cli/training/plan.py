"""``geartrain plan``: memory and step time of a training, before it is started."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from geartrain.ams.values.errors import ConfigError, GeartrainError, InvalidArgument
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, optimizer_of
from geartrain.cli.shared.options import Json
from geartrain.cli.training.plan_fit import check_fit, fit_line, max_classes, max_samples, network_bytes

if TYPE_CHECKING:
    from geartrain.bridge.head.memory import MemoryReport
    from geartrain.bridge.parallel.plan.hardware import Hardware
    from geartrain.bridge.parallel.plan.plan import Plan

_STEP = "The expected step"
_TABLE = "A hashed table"
_DTYPE = "float32, float16 or bfloat16."
_OPTIMIZERS = ", ".join(OPTIMIZERS)


def plan(
    dim: Annotated[int, typer.Option("--dim", help="Width of rows: of features and class centers, or embeddings.")],
    classes: Annotated[int | None, typer.Option("--classes", help="Number of classes.")] = None,
    sub_centers: Annotated[int, typer.Option("--sub-centers", help="Centers of a class.")] = 1,
    rows: Annotated[str, typer.Option("--rows", help="Where the rows are: pull, hosted or ranks.")] = "pull",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Storage type of the rows: {_DTYPE}")] = "float32",
    slot_dtype: Annotated[
        str | None, typer.Option("--slot-dtype", help=f"Of the momentum: {_DTYPE}", show_default="float32")
    ] = None,
    momentum: Annotated[
        bool | None, typer.Option("--momentum/--sgd", help="Whether rows have momentum.", show_default="AdamW")
    ] = None,
    adam: Annotated[bool, typer.Option("--adam", help="Rows have the two moments of Adam.")] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer", help=f"The rows' optimizer, instead of --momentum, --sgd or --adam: {_OPTIMIZERS}."
        ),
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option("--sample-rate", help="Part of the classes active in a step.", show_default="that of ClassHead"),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Neighbours of a class: KNN softmax.", show_default="none: partial FC"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Samples of a rank.", show_default="128")
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            help="Plan the most that fits: classes, into --memory or that of --hardware; or batch, the samples of a "
            "rank, and how many the selection and 16-bit rows make room for.",
            show_default="nothing",
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option("--shards", help="Shards of the cluster.", show_default="1, or one on each of --hosts")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks that train together.")] = 1,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Of the features: cpu or cuda.", show_default="cpu, or that of --hardware"),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Plan a step on it: h200, a100, v100, v100-25gbit, v100-35gbit, a YAML file of a gt.Hardware, or "
            "'here', measured, with links that cost nothing.",
            rich_help_panel=_STEP,
        ),
    ] = None,
    backbone: Annotated[
        str,
        typer.Option(
            "--backbone",
            help="stroke_net, iresnet18, iresnet50, iresnet100, timm:NAME, or package.module:function of yours.",
            rich_help_panel=_STEP,
        ),
    ] = "iresnet50",
    image_size: Annotated[int, typer.Option("--image-size", help="Pixels a side.", rich_help_panel=_STEP)] = 112,
    channels: Annotated[int, typer.Option("--channels", help="Of an image.", rich_help_panel=_STEP)] = 3,
    micro_batches: Annotated[
        int,
        typer.Option("--micro-batches", min=1, help="As gt.MicroBatches: features travel.", rich_help_panel=_STEP),
    ] = 1,
    sparsity: Annotated[
        float | None,
        typer.Option("--sparsity", help="As gt.TopKGradients.", show_default="dense", rich_help_panel=_STEP),
    ] = None,
    network_dtype: Annotated[
        str,
        typer.Option("--network-dtype", help=f"Of the network and its features: {_DTYPE}", rich_help_panel=_STEP),
    ] = "float32",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Beside nn.Linear, replicated, split and sharded.", rich_help_panel=_STEP),
    ] = False,
    ids: Annotated[
        float | None, typer.Option("--ids", help="Ids of a hashed table, as 1e9.", rich_help_panel=_TABLE)
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="Hosts of its shards.", rich_help_panel=_TABLE)] = 1,
    memory: Annotated[str, typer.Option("--memory", help="Of a host, as 64GB.", rich_help_panel=_TABLE)] = "64GB",
    seen: Annotated[
        bool,
        typer.Option("--seen", help="Rows know when they were seen (max_bytes, gt.Unseen).", rich_help_panel=_TABLE),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the memory of a class head by part, for each shard and rank, before a cluster is started.

    With --ids the memory of a hashed embedding table, and whether its hosts have enough: geartrain plan --ids 1e9 --dim
    16
    --hosts 4 --memory 64GB

    With --hardware also the memory and traffic of a step of a backbone and the head with --rows ranks, and of a build
    of the graph of --k: geartrain plan --classes 100000000 --dim 512 --k 1000 --rows ranks --ranks 256 --sparsity 0.999
    --hardware v100-25gbit. GPU times are modelled with data-sheet rates, which real machines do not reach.

    With --fit the largest size that fits: geartrain plan --fit classes --dim 512 --rows ranks --ranks 8 --dtype float16
    --hardware v100, or geartrain plan --fit batch --classes 10000000 --dim 512 --rows ranks --ranks 256 --k 100
    --hardware v100-25gbit
    """
    check_fit(fit, classes, batch_size, hardware)
    if (ids is None) == (classes is None and fit != "classes"):
        raise ConfigError("give --classes or --fit classes for a class head, or --ids for a hashed table")
    said = {"--adam": adam, "--optimizer": optimizer, "--momentum" if momentum else "--sgd": momentum is not None}
    if len(named := [name for name, value in said.items() if value]) > 1:
        raise ConfigError(f"{' and '.join(named)} each say the rows' optimizer; give one of them")
    num_shards = hosts if shards is None else shards
    if ids is not None:
        from geartrain.ams.values.expiry.rules import Unseen
        from geartrain.ams.values.specs import TableSpec
        from geartrain.cli.training.plan_table import print_table_plan

        names = {True: "momentum", False: "sgd", None: "adam" if adam else "adagrad"}
        types = {"dtype": dtype, "slot_dtype": slot_dtype or "float32"}
        of_rows = optimizer_of(optimizer or names[momentum], {"lr": 0.1})
        expiry = Unseen(steps=1) if seen else None
        spec = TableSpec(name="table", dim=dim, optimizer=of_rows, expiry=expiry, **cast(Any, types))
        print_table_plan(spec, ids, hosts, num_shards, memory, as_json)
        return
    _require_hardware(
        hardware, rows, sparsity is not None or micro_batches > 1 or compare or network_dtype != "float32"
    )
    from geartrain.ams.programs.selection import FullSoftmax, PartialFC
    from geartrain.bridge.head.defaults import DEFAULT_OPTIMIZER, DEFAULT_SELECT
    from geartrain.bridge.head.loss.config import HeadConfig  # loads torch
    from geartrain.bridge.head.memory import memory_report
    from geartrain.bridge.head.selection.knn_selection import KNNSoftmax

    with_momentum = {None: DEFAULT_OPTIMIZER.name, True: "sparse_momentum", False: "sgd"}[momentum]
    chosen = DEFAULT_SELECT if sample_rate is None else PartialFC(sample_rate)
    select = chosen if k is None else KNNSoftmax(0.1 if sample_rate is None else sample_rate, k=k)
    row_optimizer = optimizer_of(optimizer or ("adam" if adam else with_momentum), {"lr": 0.1})
    where = None if hardware is None else _hardware(hardware, device)
    head: dict[str, Any] = {
        "dim": dim,
        "sub_centers": sub_centers,
        "select": select,
        "config": HeadConfig(**cast(Any, {"dtype": dtype, "slot_dtype": slot_dtype or "float32"})),
    }

    def report_of(**changed: Any) -> MemoryReport:
        of_ranks = {"num_classes": classes, "batch_size": batch_size or 128, "num_ranks": ranks}
        settings = {**head, **of_ranks, "rows": rows, "optimizer": row_optimizer, "num_shards": num_shards}
        place = device or "cpu" if where is None else where.device
        return memory_report(**{**settings, "device": place, **changed})

    def step_of(samples: int, num_classes: int | None, compare: bool = False) -> Plan:
        images = {"channels": channels, "image_size": image_size}
        settings = {"row_optimizer": row_optimizer, "micro_batches": micro_batches, "sparsity": sparsity}
        settings |= {"num_classes": num_classes, "ranks": ranks, "batch": samples, "hardware": where}
        return _step(backbone, images, network_dtype, {**head, **settings, "compare": compare})

    from geartrain.cli.training.plan_table import bytes_of

    found: dict[str, int] = {}
    room = bytes_of(memory) if where is None else where.memory_bytes
    if fit == "classes":
        network = 0 if where is None else network_bytes(step_of(batch_size or 128, 1))
        found = {"classes": (classes := max_classes(report_of, room, network, -(-num_shards // hosts)))}
    elif fit == "batch":
        full = {"select": FullSoftmax()} if report_of().num_active < report_of().num_classes else {}
        wide = {"config": HeadConfig()} if dtype != "float32" else {}
        others = {"all classes active": full, "float32 rows": wide, "both": {**full, **wide} if full and wide else {}}
        found = max_samples(report_of, lambda samples: step_of(samples, classes), others)
        batch_size = found["samples a rank"]
    report = report_of()
    step = None if where is None else step_of(batch_size or 128, classes, compare)
    if as_json:
        steps = {} if step is None else {"step": step.to_dict()}
        print(json.dumps({**report.to_json(), **({"fit": found} if fit else {}), **steps}))
        return
    if found:
        of = "a host (--memory)" if where is None else f"a rank (--hardware {hardware})"
        print(f"{fit_line(found)}, in the {room / 1e9:,.1f} GB of {of}\n")
    print(report)
    print(f"\n{report.explained()}" if step is None else f"\na step of {backbone} with this head\n\n{step.explain()}")


def _require_hardware(hardware: str | None, rows: str, is_of_a_step: bool) -> None:
    if hardware is None and is_of_a_step:
        raise ConfigError(
            "--sparsity, --micro-batches, --network-dtype and --compare are of a step: say what it runs on, too, by "
            "--hardware"
        )
    if hardware is not None and rows != "ranks":
        raise InvalidArgument(
            f"--rows is {rows!r}, and a step is planned of rows on the ranks alone: what a cluster's links and "
            "shards take is not in the model. Give --rows ranks, or leave --hardware out"
        )


def _hardware(hardware: str, device: str | None) -> Hardware:
    from geartrain.bridge.parallel.plan.hardware import Hardware

    if hardware == "here":
        where = Hardware.measure(alone=True)
    elif Path(hardware).suffix in (".yaml", ".yml", ".json"):
        where = Hardware.read(hardware)
    else:
        where = Hardware.named(hardware)
    return replace(where, device=device or where.device)


def _step(backbone: str, images: dict[str, int], network_dtype: str, settings: dict[str, Any]) -> Plan:
    """Plan a step of the classifier. Raises InvalidArgument or ConfigError for settings that cannot be right."""
    import torch

    with _without_triton():
        from geartrain.bridge.parallel.plan.auto import plan_classifier
    from geartrain.bridge.parallel.plan.meta import MetaMode
    from geartrain.workers.models.backbones import build_backbone

    if network_dtype not in ("float32", "float16", "bfloat16"):
        raise InvalidArgument(f"--network-dtype is {network_dtype!r}; it must be {_DTYPE}")
    side, dtype = images["image_size"], getattr(torch, network_dtype)
    with torch.device("meta"), MetaMode():
        try:
            network = build_backbone(backbone, {**images, "dim": settings["dim"]}, own=backbone).to(dtype)
        except GeartrainError:
            raise
        except (RuntimeError, ValueError) as exc:
            raise InvalidArgument(
                f"backbone {backbone} cannot be made for images of {side} x {side}: {exc}. Give another --image-size"
            ) from exc
        example = torch.empty(settings["batch"], images["channels"], side, side, dtype=dtype)
    return plan_classifier(network, example, **settings)


@contextmanager
def _without_triton() -> Iterator[None]:
    """Import modules in the block as if there were no Triton: torch's formulas of arithmetic, which take longer to load
    with it, need it for kernels of one's own alone."""
    told, is_loaded = logging.getLogger("torch.utils.flop_counter"), "triton" in sys.modules
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    told.disabled = True
    try:
        yield
    finally:
        told.disabled = False
        if not is_loaded:
            del sys.modules["triton"]
