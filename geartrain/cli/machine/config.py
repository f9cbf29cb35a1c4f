"""``geartrain config``: print the settings a role would run with, and check a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.text import counted
from geartrain.cli.shared.options import ConfigFile, Json
from geartrain.launch import configuration

app = typer.Typer(no_args_is_help=True, help="Show or check the configuration.")


@app.command()
def show(file: ConfigFile = None, as_json: Json = False) -> None:
    """Print the effective configuration: defaults, then the file, then GEARTRAIN_SECTION__KEY from the environment."""
    config = configuration.load(file)
    print(json.dumps(configuration.to_plain(config), indent=2) if as_json else configuration.to_yaml(config))


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="YAML configuration.")], as_json: Json = False) -> None:
    """Check a file; reports a mistake with its line, and exits with 2."""
    config = configuration.load(file, environ={})
    servers = config.num_servers
    facts = {"valid": True, "num_shards": config.scheduler.num_shards, "num_servers": servers}
    text = f"{counted(config.scheduler.num_shards, 'shard')} on {counted(servers, 'server')}"
    print(json.dumps(facts) if as_json else f"{file}: valid, {text}")
