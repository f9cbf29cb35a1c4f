"""``geartrain table``: list, expire, alter and drop the tables of a running cluster."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted, sized
from geartrain.cli.shared.clusters import connected, settings
from geartrain.cli.shared.consoles import progress_bar
from geartrain.cli.shared.options import ConfigFile, GraphAddress, Json, SchedulerAddress

if TYPE_CHECKING:
    from geartrain.ams.client.cluster_status import ClusterStatus

_INCOMPLETE = (
    "incomplete: a shard with rows of it was restarted, or its creation or drop was cut off; drop it, or restore a "
    "snapshot in its place"
)
_RESTORING = (
    "incomplete: it is being restored from a snapshot; if the process that did so is gone, restore the snapshot again, "
    "or drop it"
)


def why_incomplete(found: ClusterStatus, table: str) -> str:
    """Return why a table is incomplete, and the remedy."""
    return _RESTORING if table in found.restoring_tables else _INCOMPLETE


app = typer.Typer(no_args_is_help=True, help="List, alter or drop the tables of a running cluster, or rows of them.")


@app.command(name="list")
def list_(file: ConfigFile = None, scheduler: SchedulerAddress = None, as_json: Json = False) -> None:
    """List the tables of a cluster. A job drops its own tables when it ends; a killed job leaves them."""
    config = settings(file, scheduler)
    from geartrain.ams.client.cluster_status import (
        cluster_status,  # slow to import: only after the settings are checked
    )

    found = cluster_status(config.server.scheduler, config=config.client)
    tables = found.tables
    if as_json:
        print(json.dumps([dataclasses.asdict(table) for table in tables]))
        return
    _warn_of_absent_shards(found)
    for table in tables:
        ids = "any id" if table.num_rows is None else f"ids below {table.num_rows:,}"
        rows, memory = counted(table.rows, "row"), sized(table.memory_bytes)
        print(f"{table.name}: {rows} of dim {table.dim}, {ids}, {memory}, {counted(table.writes, 'write')}")
    for name, number in zip(found.incomplete_tables, found.incomplete_rows, strict=True):
        print(f"{name}: {counted(number, 'row')}, {why_incomplete(found, name)}")
    if not tables and not found.incomplete_tables:
        print("this cluster has no table")


def _warn_of_absent_shards(status: ClusterStatus) -> None:
    absent = [f"{shard.shard} ({shard.state})" for shard in status.shards if shard.state != "up"]
    if absent:
        print(f"rows and writes of shard {', '.join(absent)} are not counted", file=sys.stderr)


@app.command()
def expire(
    name: Annotated[str, typer.Argument(help="Table whose rows to look at.")],
    unseen_steps: Annotated[
        int | None, typer.Option(help="Rows go that nobody pushed for more than so many steps of its clock.")
    ] = None,
    unseen_seconds: Annotated[float | None, typer.Option(help="The same in seconds.")] = None,
    smaller_than: Annotated[float | None, typer.Option(help="Rows go whose Euclidean norm is below that.")] = None,
    rule: Annotated[
        str | None, typer.Option(help="Rows go that it says: 'unseen_steps > 1000 and count < 3', or module:function.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Remove rows by a rule, now; by default by the table's own rule."""
    from geartrain.ams.values.expiry.rules import Rule, SmallerThan, Unseen

    asked = {"steps": unseen_steps, "seconds": unseen_seconds, "norm": smaller_than, "rule": rule}
    given = {kind: value for kind, value in asked.items() if value is not None}
    if len(given) > 1:
        raise ConfigError("give one of --unseen-steps, --unseen-seconds, --smaller-than and --rule, or none of them")
    rules: dict[str, Callable[[Any], Any]] = {
        "steps": lambda steps: Unseen(steps=steps),
        "seconds": lambda seconds: Unseen(seconds=seconds),
        "norm": SmallerThan,
        "rule": Rule,
    }
    chosen = next((rules[kind](value) for kind, value in given.items()), None)
    with connected(file, scheduler) as cluster:
        table = cluster.table(name)
        rows = next((entry.rows for entry in cluster.status().tables if entry.name == name), 0)
        with progress_bar(f"rows of {name}", quiet=as_json or not sys.stderr.isatty()) as show:
            found = table.expire(chosen, dry_run=dry_run, progress=lambda far: show(far.looked_at, rows))
    if as_json:
        print(json.dumps({"table": name, **found._asdict()}))
        return
    print(f"{name}: {found.expired:,} of {counted(found.looked_at, 'row')} {'would go' if dry_run else 'went'}")


@app.command()
def alter(
    name: Annotated[str, typer.Argument(help="Table to alter.")],
    max_bytes: Annotated[int | None, typer.Option(help="Of memory that all of its rows may take.")] = None,
    unseen_steps: Annotated[
        int | None, typer.Option(help="Rows expire that nobody pushed for more than so many steps of its clock.")
    ] = None,
    unseen_seconds: Annotated[float | None, typer.Option(help="The same in seconds.")] = None,
    min_count: Annotated[int | None, typer.Option(help="An id gets a row when it occurs so often.")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="A number of its optimizer, for pushes that say none: lr=0.05. Repeatable.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="No more of max_bytes, expiry or admission. Repeatable.")
    ] = None,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Change settings of an existing table on every shard, also during training; settings not given stay.

    In Python cluster.alter_table takes any expiry and admission rule, and another initializer.
    """
    from geartrain.ams.values.admission.rules import MinCount
    from geartrain.ams.values.expiry.rules import Unseen
    from geartrain.ams.values.optimizers.registry import optimizer_of

    settings: dict[str, Any] = dict.fromkeys(without or ())
    if wrong := settings.keys() - {"max_bytes", "expiry", "admission"}:
        raise ConfigError(f"--without is {min(wrong)!r}; it must be max_bytes, expiry or admission")
    given: dict[str, dict[str, float | None]] = {
        "max_bytes": {"--max-bytes": max_bytes},
        "expiry": {"--unseen-steps": unseen_steps, "--unseen-seconds": unseen_seconds},
        "admission": {"--min-count": min_count},
    }
    for key in settings:
        if both := [flag for flag, value in given[key].items() if value is not None]:
            raise ConfigError(f"{both[0]} and --without {key} contradict each other; give one of them")
    if max_bytes is not None:
        settings["max_bytes"] = max_bytes
    if unseen_steps is not None or unseen_seconds is not None:
        settings["expiry"] = Unseen(steps=unseen_steps, seconds=unseen_seconds)
    if min_count is not None:
        settings["admission"] = MinCount(min_count)
    with connected(file, scheduler) as cluster:
        before = cluster.table(name).spec
        if optimizer:
            try:
                numbers = {key: float(value) for key, _, value in (text.partition("=") for text in optimizer)}
            except ValueError:
                raise ConfigError(f"--optimizer is {optimizer}; each must be a name and a number: lr=0.05") from None
            settings["optimizer"] = optimizer_of(before.optimizer.name, before.optimizer.scalars() | numbers)
        if not settings:
            raise ConfigError("say what to alter: --max-bytes, --unseen-steps, --min-count, --optimizer, --without")
        now = cluster.alter_table(name, **settings).spec
    print(json.dumps(now.to_dict()) if as_json else f"{name}: {now.unlike(before) or 'it was so already'}")


@app.command()
def drop(
    names: Annotated[list[str], typer.Argument(help="Tables to drop, with all their rows.")],
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove tables and their rows from every shard, after asking. A job that still uses one of them fails.

    Also removes their graphs if the graph service is named; otherwise the service drops each graph once another table
    of its name exists.
    """
    if as_json and not yes:
        raise ConfigError("--json cannot ask for confirmation; add --yes")
    with connected(file, scheduler, graph) as cluster:
        status = cluster.status()
        rows = {table.name: table.rows for table in status.tables}
        rows |= dict(zip(status.incomplete_tables, status.incomplete_rows, strict=True))
        for name in names:
            if name not in rows:
                cluster.table(name)  # raises an error that says why it is absent
        rows = {name: rows.get(name, 0) for name in names}
        if not yes:
            _warn_of_absent_shards(status)
            listed = ", ".join(f"{name!r} ({counted(number, 'row')})" for name, number in rows.items())
            typer.confirm(f"Drop {listed}? There is no way back but a snapshot", abort=True, err=True)
        for name in rows:
            cluster.drop_table(name)
    print(json.dumps({"dropped": rows}) if as_json else f"dropped {', '.join(rows)}")
