"""``geartrain doctor``: checks of this machine before a cluster or a training runs on it, with remedies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.shared.options import ConfigFile, Json
from geartrain.launch import configuration
from geartrain.launch.doctor import DISK_GIB, examine

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    file: ConfigFile = None,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="host:port of a running cluster to look at, too.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where snapshots or runs will be written.")] = Path("runs"),
    disk_gib: Annotated[float, typer.Option("--disk-gib", min=0, help="Free space that must be there.")] = DISK_GIB,
    as_json: Json = False,
) -> None:
    """Check versions, ports, clocks, disk and limits, with a remedy for each fault; exits with 1 if any fails."""
    config = configuration.load(file)
    findings = list(examine(config, folder, scheduler=scheduler, disk_gib=disk_gib))
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        from rich.text import Text

        from geartrain.cli.shared.consoles import plain_console

        console = plain_console(soft_wrap=True)
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            state = f"{finding.state:4}", _COLOURS[finding.state]
            console.print(Text.assemble(state, f"  {finding.check:{width}}  {finding.found}"))
            if finding.remedy:
                console.print(f"{'':{width + 8}}-> {finding.remedy}")
    if failed:
        raise typer.Exit(1)
