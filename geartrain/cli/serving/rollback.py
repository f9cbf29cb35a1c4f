"""``geartrain rollback``: serve an older version of a model again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from geartrain.cli.shared.options import Json, SecurityFolder


def rollback(
    address: Annotated[str, typer.Argument(help="host:port of the service, as 127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Argument(help="Name of the model.", show_default="the only one")] = None,
    to: Annotated[
        int | None, typer.Option(min=0, help="The version.", show_default="that of the next lower number")
    ] = None,
    security_folder: SecurityFolder = None,
    as_json: Json = False,
) -> None:
    """Make an older version of a served model the current one, from the next request on; no request fails.

    A version's number is the training step. Versions with higher numbers then wait, also later ones; 'geartrain
    rollback HOST:PORT --to HIGHEST' resumes with them.
    """
    from geartrain.ams.values.config import split_address
    from geartrain.launch import configuration
    from geartrain.serving.http.client import request_json

    split_address(address)
    configuration.load(None, configuration.flags("security", prefix="security-", folder=security_folder))
    if model is None:
        models = [found["name"] for found in request_json(address, "GET", "/v1/models")["models"]]
        if len(models) != 1:
            raise typer.BadParameter(f"name the model: {', '.join(models)}", param_hint="MODEL")
        (model,) = models
    told = request_json(address, "POST", f"/v1/models/{model}/rollback", {} if to is None else {"to": to})
    print(json.dumps(told) if as_json else f"{address}: version {told['current']} of {told['model']} is current")
