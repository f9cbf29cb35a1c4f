"""``geartrain scheduler`` and ``geartrain server``: one role in this process."""

from __future__ import annotations

from typing import Annotated

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.config import SchedulerConfig, ServerConfig
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import (
    ConfigFile,
    Insecure,
    LogLevel,
    Mode,
    SchedulerAddress,
    SnapshotRoots,
    shows_defaults,
)
from geartrain.launch import role
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.ports import require_free

Listen = Annotated[str | None, typer.Option(help="host:port to serve on; port 0 picks a free one.")]
EndWithParent = Annotated[bool, typer.Option("--end-with-parent", hidden=True, help="End when stdin closes.")]


@shows_defaults(SchedulerConfig)
def scheduler(
    file: ConfigFile = None,
    listen: Listen = None,
    num_shards: Annotated[int | None, typer.Option("--num-shards", help="Shards of the cluster.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder for its state; by default it is kept in memory.")] = None,
    insecure: Insecure = None,
    mode: Mode = None,
    log_level: LogLevel = "info",
    end_with_parent: EndWithParent = False,
) -> None:
    """Run the scheduler: membership, placement and tables of a cluster.

    Prints one line of JSON when it serves: {"ready": "scheduler", "address": ..., "num_shards": ..., "pid": ...}.
    """
    log_to_stderr(log_level)
    if end_with_parent:
        role.end_with_parent()
    given = configuration.flags("scheduler", listen=listen, num_shards=num_shards, data=data, insecure=insecure)
    given += configuration.flags(configuration.WHOLE, mode=mode)
    whole = configuration.load(file, given)
    failpoints.arm_from_environment(whole.mode)
    config = whole.scheduler
    from geartrain.ams.scheduler.service import (
        SchedulerServer,  # after the settings are known to be right: it is slower
    )

    require_free(config.listen, "--listen")
    role.warn_if_open(config.listen)
    service = SchedulerServer(config)
    address = service.start()
    role.serve("scheduler", service, address=address, num_shards=config.num_shards)


@shows_defaults(ServerConfig)
def server(
    file: ConfigFile = None,
    listen: Listen = None,
    scheduler: SchedulerAddress = None,
    advertise: Annotated[str | None, typer.Option(help="host:port for clients, if not the one bound.")] = None,
    shard: Annotated[int | None, typer.Option(help="Shard to hold; by default the first that is free.")] = None,
    shards: Annotated[int | None, typer.Option(help="Shards to hold in this process.")] = None,
    ports: Annotated[
        str | None, typer.Option(help="Port of each shard held, as 7001,7002, in place of that of --listen.")
    ] = None,
    data_port: Annotated[
        int | None,
        typer.Option("--data-port", help="Port for rows of the host's first shard; each further one takes the next."),
    ] = None,
    wait: Annotated[
        bool | None, typer.Option("--wait", help="Wait for a shard that another process holds, or has just held.")
    ] = None,
    cpus: Annotated[str | None, typer.Option(help="CPUs to keep to, as 0-3,6; by default all it is given.")] = None,
    snapshot_roots: SnapshotRoots = None,
    rule_modules: Annotated[
        str | None,
        typer.Option(help="Modules with rules by which rows go (@gt.expiry_rule), as my_package.rules; imported here."),
    ] = None,
    insecure: Insecure = None,
    mode: Mode = None,
    log_level: LogLevel = "info",
    end_with_parent: EndWithParent = False,
) -> None:
    """Run a server: a process that holds one or more shards.

    Prints one line of JSON when it has joined the cluster: {"ready": "server", "addresses": [...], "pid": ...}.
    """
    log_to_stderr(log_level)
    if end_with_parent:
        role.end_with_parent()
    given = configuration.flags(
        "server",
        listen=listen,
        scheduler=scheduler,
        advertise=advertise,
        shard=shard,
        shards=shards,
        ports=ports,
        data_port=data_port,
        wait=wait,
        cpus=cpus,
        snapshot_roots=snapshot_roots,
        rule_modules=rule_modules,
        insecure=insecure,
    )
    given += configuration.flags(configuration.WHOLE, mode=mode)
    whole = configuration.load(file, given)
    failpoints.arm_from_environment(whole.mode)
    config = whole.server
    from geartrain.ams.programs.models import hosted_models
    from geartrain.ams.server.role import ShardServer  # after the settings are known to be right: it is slower

    if config.ports is None:
        require_free(config.listen, "--listen")
    role.warn_if_open(config.listen)
    service = ShardServer(config, hosted_models())
    addresses = service.start()
    role.serve("server", service, addresses=addresses)
