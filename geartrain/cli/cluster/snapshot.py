"""``geartrain snapshot``: create, list, verify, restore, compact and prune snapshots of a cluster."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted, sized
from geartrain.cli.shared.clusters import connected
from geartrain.cli.shared.consoles import progress_bar
from geartrain.cli.shared.options import ConfigFile, GraphAddress, Json, SchedulerAddress

if TYPE_CHECKING:
    from geartrain.ams.storage.snapshot.folder import ListedSnapshot, Snapshot
    from geartrain.ams.storage.snapshot.store import Place

FAILED = 1

app = typer.Typer(no_args_is_help=True, help="Take, list, check, restore, compact and remove snapshots of a cluster.")

Root = Annotated[str, typer.Argument(help="Folder or URL with the snapshots; the same for all servers.")]
OfSnapshot = Annotated[
    str, typer.Argument(help="A snapshot, or what holds snapshots (then the newest one): folder or URL.")
]
Fallback = Annotated[
    bool, typer.Option("--allow-fallback", help="If the newest snapshot is damaged, use the newest one that is not.")
]
TableOptions = Annotated[list[str] | None, typer.Option("--table", help="Only this table; may be given again.")]


@app.command()
def create(
    root: Root,
    name: Annotated[
        str | None,
        typer.Option(help="Name of its folder.", show_default="step-NNNNNNNNN, or -2 … behind it if that is taken"),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Step of the job, recorded in the manifest.")] = 0,
    table: TableOptions = None,
    parent: Annotated[
        str | None, typer.Option(help="Snapshot of the same folder to add to: only rows written since are written.")
    ] = None,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Snapshot the tables of a running cluster, at a moment when no worker is in the middle of a step.

    Includes the tables' graphs if the graph service is named.
    """
    with connected(file, scheduler, graph) as cluster:
        path = cluster.snapshot(root, name, step=step, tables=table or None, parent=parent).result()
    from geartrain.ams.storage.snapshot.folder import open_snapshot

    facts = _facts(open_snapshot(path))
    print(json.dumps(facts) if as_json else f"{path}: {_summary(facts)}")


@app.command(name="list")
def list_(root: Root, as_json: Json = False) -> None:
    """List the snapshots of a folder, newest first; reads only their manifests."""
    from geartrain.ams.storage.snapshot.folder import list_snapshots

    found = [_listed(listed) for listed in list_snapshots(_folder(root))]
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print(f"{root} holds no snapshot; 'geartrain snapshot create {root}' takes one")
        return
    for facts in found:
        print(f"{facts['name']}: {facts['damage'] or _summary(facts)}")


@app.command()
def verify(where: OfSnapshot, as_json: Json = False) -> None:
    """Read every byte of a snapshot and list all damage; exits with 1 if there is any."""
    from geartrain.ams.storage.snapshot.folder import list_snapshots, open_snapshot

    if _is_snapshot(where):
        snapshot = open_snapshot(where)
    else:
        listed = list_snapshots(_folder(where))
        if not listed:
            raise ConfigError(f"{where} is no snapshot and holds none; give a snapshot, or the folder that holds some")
        if listed[0].snapshot is None:
            assert listed[0].damage is not None
            raise listed[0].damage
        snapshot = listed[0].snapshot
    with progress_bar("checking") as progress:
        damage = [str(error) for error in snapshot.verify(progress)]
    facts = {**_facts(snapshot), "damage": damage}
    if as_json:
        print(json.dumps(facts))
    else:
        for line in damage:
            print(line)
        print(f"{snapshot.path}: {counted(len(damage), 'fault') if damage else 'sound, ' + _summary(facts)}")
    if damage:
        raise typer.Exit(FAILED)


@app.command()
def restore(
    where: OfSnapshot,
    allow_fallback: Fallback = False,
    table: TableOptions = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Drop tables of these names first, once the snapshot is known to be sound; others open them anew.",
        ),
    ] = False,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Restore a snapshot's tables, with rows and slots, to a running cluster of any number of shards.

    Also restores its graphs if the graph service is named.
    """
    from geartrain.ams.storage.snapshot.folder import latest

    path = where if _is_snapshot(where) else latest(_folder(where), allow_fallback=allow_fallback).path
    with connected(file, scheduler, graph) as cluster:
        facts = _facts(cluster.restore(path, tables=table or None, replace=replace))
    print(json.dumps(facts) if as_json else f"restored {path}: {_summary(facts)}")


@app.command()
def compact(
    where: OfSnapshot,
    new_name: Annotated[
        str | None, typer.Option("--as", help="Name of the new one.", show_default="NAME-whole")
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge a snapshot and those it builds on into a new one beside it that stands alone; 'prune' then removes the
    others."""
    from geartrain.ams.storage.snapshot.compaction import compact as compact_chain
    from geartrain.ams.storage.snapshot.folder import latest, open_snapshot
    from geartrain.ams.storage.snapshot.store import parent_of

    snapshot = open_snapshot(where) if _is_snapshot(where) else latest(_folder(where))
    path = compact_chain(parent_of(snapshot.path), snapshot.name, new_name=new_name)
    facts = _facts(open_snapshot(path))
    print(json.dumps(facts) if as_json else f"{path}: {_summary(facts)}")


@app.command()
def prune(
    root: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest snapshots stay.")],
    as_json: Json = False,
) -> None:
    """Remove old snapshots and the remains of interrupted ones; never the last sound one, nor one that a kept one
    builds on.
    """
    from geartrain.ams.storage.snapshot.folder import prune as prune_folder

    removed = prune_folder(_folder(root), keep)
    text = f"removed {', '.join(removed)}" if removed else "nothing to remove"
    print(json.dumps({"removed": removed}) if as_json else text)


def _folder(path: str) -> Place:
    from geartrain.ams.storage.snapshot.store import place

    folder = place(path)
    if isinstance(folder, Path) and not folder.is_dir():
        raise ConfigError(f"{path} is not a folder; give a snapshot, or the folder that holds some")
    return folder


def _is_snapshot(path: str) -> bool:
    from geartrain.ams.storage.snapshot.manifest import MANIFEST
    from geartrain.ams.storage.snapshot.store import place, store_of

    folder = place(path)
    try:
        return MANIFEST in store_of(folder).names(folder)
    except OSError:
        return False


def _listed(listed: ListedSnapshot) -> dict[str, Any]:
    if listed.snapshot is None:
        return {"name": listed.name, "path": str(listed.path), "damage": str(listed.damage)}
    return {**_facts(listed.snapshot), "damage": None}


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    from geartrain.ams.storage.snapshot.manifest import GRAPH, ROW_KINDS

    manifest = snapshot.manifest
    rows: dict[str, int] = {str(spec["name"]): 0 for spec in manifest.tables}
    for entry in manifest.files:
        if entry.table is not None and entry.kind in ROW_KINDS:
            rows[entry.table] += entry.num_rows
    return {
        "name": snapshot.name,
        "path": str(snapshot.path),
        "step": manifest.step,
        "created": datetime.fromtimestamp(manifest.created, UTC).isoformat(timespec="seconds"),
        "num_shards": manifest.num_shards,
        "parent": None if manifest.parent is None else manifest.parent.name,
        "rows": rows,
        "graphs": sorted({str(entry.table) for entry in manifest.files if entry.kind == GRAPH}),
        "bytes": sum(entry.bytes for entry in manifest.files),
    }


def _summary(facts: dict[str, Any]) -> str:
    tables, rows = len(facts["rows"]), sum(facts["rows"].values())
    return (
        f"step {facts['step']}, {facts['created']}, {counted(tables, 'table')}, {counted(rows, 'row')}, "
        f"{sized(facts['bytes'])} from {counted(facts['num_shards'], 'shard')}"
        + (f", {counted(len(facts['graphs']), 'graph')}" if facts["graphs"] else "")
        + (f", added to {facts['parent']}" if facts["parent"] else "")
    )
