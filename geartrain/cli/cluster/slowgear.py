"""``geartrain slowgear``: a slow gear as a process."""

from __future__ import annotations

from typing import Annotated

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.config import SlowGearConfig
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import ConfigFile, Insecure, LogLevel, Mode, SchedulerAddress, shows_defaults
from geartrain.launch import role
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.ports import require_free


@shows_defaults(SlowGearConfig)
def slowgear(
    file: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="host:port to serve on; port 0 picks a free one.")] = None,
    scheduler: SchedulerAddress = None,
    advertise: Annotated[str | None, typer.Option(help="host:port for fast gears, if not the one bound.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the dense part and of its dense table.")] = None,
    module: Annotated[
        str | None, typer.Option(help="Function that builds the nn.Module, as mypkg.image:build.")
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Samples by id: a function as mypkg.image:samples, folder:PATH, lmdb:PATH or redis://..."),
    ] = None,
    decode: Annotated[
        str | None, typer.Option(help="Function that makes a tensor of a sample's bytes; by default an image's pixels.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Width of a dense feature.")] = None,
    store: Annotated[
        str | None, typer.Option(help="For features: memory, lmdb:PATH or redis://HOST:PORT/0 (shared).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the module runs, as cuda:0.")] = None,
    autocast: Annotated[str | None, typer.Option(help="Mixed precision: none, bfloat16 or float16.")] = None,
    train_mode: Annotated[
        str | None, typer.Option(help="When the module is in train(): backward, always or never.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Of the dense table: NAME:RATE, such as sgd:0.01, momentum:0.01 or adam:0.001.")
    ] = None,
    expire_seconds: Annotated[float | None, typer.Option(help="Older features are computed again.")] = None,
    max_version_lag: Annotated[int | None, typer.Option(help="So many dense updates behind, too.")] = None,
    gradients_per_id: Annotated[
        int | None, typer.Option("--gradients-per-id", "-m", help="Gradients of an id that make one backward pass.")
    ] = None,
    ids_per_update: Annotated[
        int | None, typer.Option("--ids-per-update", help="Ids with so many that are waited for; about a batch's.")
    ] = None,
    reduction: Annotated[str | None, typer.Option(help="Of those gradients: mean or sum.")] = None,
    flush_seconds: Annotated[float | None, typer.Option(help="Longest wait of gradients for more of their id.")] = None,
    stale: Annotated[str | None, typer.Option(help="Gradients of old features: apply, scale or drop.")] = None,
    max_gradient_lag: Annotated[int | None, typer.Option(help="With drop: beyond so many dense updates.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most ids of one device batch.")] = None,
    max_wait_millis: Annotated[float | None, typer.Option(help="How long a batch of features waits for more.")] = None,
    refresh_seconds: Annotated[
        float | None, typer.Option(help="How often other slow gears' updates are looked for; in sync mode 0.")
    ] = None,
    insecure: Insecure = None,
    mode: Mode = None,
    log_level: LogLevel = "info",
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Run a slow gear: it serves the dense features of a module by id, and trains the module with their gradients.

    Start as many as you like: they share the ids out among them. SIGTERM: it applies what waits and gives its ids to
    the others. Prints one line of JSON when it serves: {"ready": "slowgear", "address": ..., "name": ...,
    "partitions": ..., "pid": ...}.
    """
    log_to_stderr(log_level)
    if end_with_parent:
        role.end_with_parent()
    given = configuration.flags(
        "slowgear",
        listen=listen,
        scheduler=scheduler,
        advertise=advertise,
        name=name,
        module=module,
        samples=samples,
        decode=decode,
        dim=dim,
        store=store,
        device=device,
        autocast=autocast,
        train_mode=train_mode,
        optimizer=optimizer,
        expire_seconds=expire_seconds,
        max_version_lag=max_version_lag,
        gradients_per_id=gradients_per_id,
        ids_per_update=ids_per_update,
        reduction=reduction,
        flush_seconds=flush_seconds,
        stale=stale,
        max_gradient_lag=max_gradient_lag,
        max_batch=max_batch,
        max_wait_millis=max_wait_millis,
        refresh_seconds=refresh_seconds,
        insecure=insecure,
    )
    given += configuration.flags(configuration.WHOLE, mode=mode)
    whole = configuration.load(file, given)
    failpoints.arm_from_environment(whole.mode)
    from geartrain.launch.slowgear_role import SlowGearRole  # after the settings are known to be right: it loads torch

    require_free(whole.slowgear.listen, "--listen")
    role.warn_if_open(whole.slowgear.listen)
    service = SlowGearRole(whole.slowgear, whole.client)
    address = service.start()
    role.serve("slowgear", service, address=address, name=service.name, partitions=service.partitions)
