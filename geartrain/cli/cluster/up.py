"""``geartrain up``: a whole cluster on this machine or on Ray."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.config import NO_FOLDER, ClusterConfig, is_loopback
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.cli.cluster.dashboard import DEFAULT_LISTEN
from geartrain.cli.cluster.roles import add_parameters
from geartrain.cli.shared.options import ConfigFile, Insecure, Json, RunMode, SecurityFolder
from geartrain.launch import configuration
from geartrain.launch.certificates import create_private_folder
from geartrain.launch.roles import ROLES
from geartrain.launch.up import ClusterFacts, Launcher, next_address


def up(
    file: ConfigFile = None,
    shards: Annotated[
        int | None, typer.Option("--shards", help="Shards of the cluster, by default one process each.")
    ] = None,
    scheduler_listen: Annotated[
        str | None, typer.Option("--scheduler-listen", help="host:port of the scheduler; port 0 picks a free one.")
    ] = None,
    data_port: Annotated[
        int | None,
        typer.Option("--data-port", help="Port for rows of the first shard; each further one takes the next."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="host:port where the scheduler tells Prometheus what it counts; each further role the next."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a role that dies again, or end the cluster.")
    ] = True,
    data: Annotated[
        Path | None, typer.Option(help="Folder for what shall survive the cluster, by role: FOLDER/scheduler, ...")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            help="File for a line of JSON of each refused call, and each that changes tables.",
            show_default="audit.log in the folder of --data; else the log",
        ),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the cluster in a browser, too; the ready line has the link.")
    ] = False,
    dashboard_listen: Annotated[
        str | None,
        typer.Option("--dashboard-listen", help="host:port of that page.", show_default=DEFAULT_LISTEN),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="machine: as processes of this machine; ray: as actors on the nodes of Ray.")
    ] = "machine",
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="With --on ray: of Ray, as 10.0.0.1:6379.",
            show_default="RAY_ADDRESS; a Ray of this machine, started if none runs",
        ),
    ] = None,
    insecure: Insecure = None,
    mode: RunMode = None,
    security_folder: SecurityFolder = None,
    as_json: Json = False,
    **more: Any,
) -> None:
    """Start a scheduler and its servers as processes of this machine, or on Ray; stop them on Ctrl-C or SIGTERM.

    Prints one line when every shard serves; the roles' logs go to stderr, prefixed with the role's name.
    """
    if on not in ("machine", "ray"):
        raise ConfigError(f"--on is {on!r}; it is machine or ray")
    if address is not None and on != "ray":
        raise ConfigError(f"--address {address} is of Ray; give --on ray, too, or leave it out")
    if dashboard_listen is None and dashboard:
        dashboard_listen = DEFAULT_LISTEN
    if dashboard_listen is not None and on == "ray":
        raise ConfigError("--dashboard is for --on machine; beside Ray, 'geartrain dashboard --scheduler ...' shows it")
    wanted = [name for name in _optional() if more[name] or more[f"{name}_listen"] is not None]
    listens = {"scheduler": scheduler_listen, **{name: more[f"{name}_listen"] for name in wanted}}
    given = configuration.flags("server", insecure=insecure, data_port=data_port)
    for name, listen in listens.items():
        state = (
            str(data.absolute() / name) if data is not None and "data" in ROLES[name].settings.model_fields else None
        )
        given += configuration.flags(name, data=state, insecure=insecure)
        given += configuration.flags(name, prefix=f"{name}-", listen=listen)
    if shards is not None:
        given.append(configuration.Setting("scheduler", "num_shards", shards, "flag --shards"))
    given += configuration.flags(configuration.WHOLE, mode=mode)
    given += configuration.flags("security", prefix="security-", folder=_absolute(security_folder))
    given += configuration.flags("security", audit=_absolute(audit))
    if data is not None and configuration.load(file, given).security.audit is None:
        with suppress(OSError):  # the roles report what is wrong with it
            data.mkdir(parents=True, exist_ok=True)
            given += configuration.flags("security", audit=_absolute(data / "audit.log"))
    config = configuration.load(file, given)
    if metrics is not None:
        firsts = {"scheduler": 0, "server": 1} | {name: 1 + config.num_servers + i for i, name in enumerate(wanted)}
        for name, first in firsts.items():
            given += configuration.flags(name, metrics=next_address(metrics, first))
        config = configuration.load(file, given)
    if is_loopback(config.scheduler.listen) and not config.scheduler.insecure:
        create_private_folder()  # once here, rather than by every child
    failpoints.require_allowed(config.mode)  # once here, rather than by every child
    with _launcher(config, on, address, wanted, restart, dashboard_listen) as launcher:
        facts = launcher.start()
        if facts is None:
            return
        if as_json:
            more = {name: facts.more.get(name) for name in _optional()}
            told = {
                "ready": "cluster",
                "scheduler": facts.scheduler,
                "shards": facts.shards,
                "pids": facts.pids,
                **more,
                "metrics": facts.metrics,
                "dashboard": facts.dashboard,
            }
            print(json.dumps(told), flush=True)
        elif sys.stdout.isatty():
            _print_ready(facts, config.security.folder)
        else:
            print(_ready_line(facts), flush=True)
        launcher.wait()
    kept = ["snapshots", *filter(None, (getattr(getattr(config, name), "data", None) for name in listens))]
    _print_log_line(f"ended; kept: {', '.join(kept)}")


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(path) if path == NO_FOLDER else str(Path(path).absolute())


def _launcher(
    config: ClusterConfig, on: str, address: str | None, more: list[str], restart: bool, dashboard: str | None
) -> Any:
    if on == "machine":
        return Launcher(config, _print_log_line, more, restart=restart, dashboard=dashboard)
    try:
        from geartrain.ray.up import RayLauncher
    except ModuleNotFoundError as exc:
        raise ConfigError(f"--on ray needs Ray, which cannot be imported: {exc}; pip install 'geartrain[ray]'") from exc
    return RayLauncher(config, address, more, restart=restart)


def _optional() -> list[str]:
    return [name for name, role in ROLES.items() if role.in_up]


def command() -> Callable[..., None]:
    """Return ``up`` with a flag for each role that it can start beside the cluster."""
    parameters = {
        name: (parameter.annotation, parameter.default)
        for name, parameter in inspect.signature(up, eval_str=True).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    for name in _optional():
        title = ROLES[name].title
        start = typer.Option(f"--{name}", help=f"Start a {title}, too.")
        listen = typer.Option(f"--{name}-listen", help=f"host:port of the {title}; port 0 picks a free one.")
        parameters |= {name: (Annotated[bool, start], False), f"{name}_listen": (Annotated[str | None, listen], None)}

    def run(**given: Any) -> None:
        up(**given)

    run.__doc__ = up.__doc__
    add_parameters(run, parameters)
    return run


def _ready_line(facts: ClusterFacts) -> str:
    """Return the line ``ready: scheduler 127.0.0.1:7000 (pid 12) · 2 shards (pid 13, 14)``."""
    pids = dict(facts.pids)
    scheduler = pids.pop("scheduler")
    more = [f" · {ROLES[name].title} {address} (pid {pids.pop(name)})" for name, address in facts.more.items()]
    pids.pop("dashboard", None)
    shards = f"{counted(len(facts.shards), 'shard')} (pid {', '.join(map(str, pids.values()))})"
    metrics = f" · metrics at {', '.join(facts.metrics.values())}" if facts.metrics else ""
    page = f" · dashboard {facts.dashboard}" if facts.dashboard else ""
    return f"ready: scheduler {facts.scheduler} (pid {scheduler}) · {shards}{''.join(more)}{metrics}{page}"


def _print_ready(facts: ClusterFacts, security_folder: str | None = None) -> None:
    """Print the roles, the link and the next commands for a person, in a box; below it where the window is too
    narrow."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    ready = _ready_line(replace(facts, dashboard=None)).removeprefix("ready: ")
    under = f"GEARTRAIN_SECURITY__FOLDER={shlex.quote(security_folder)} " if security_folder else ""
    given = "" if facts.scheduler == ClusterConfig().scheduler.listen else f" --scheduler {facts.scheduler}"
    nexts = [
        facts.dashboard or f"{under}geartrain dashboard{given}",
        f"{under}geartrain top{given}",
        f"{under}geartrain worker ctr --data movielens --scheduler {facts.scheduler}",
    ]
    lines = [f"{what:<11}{line}" for what, line in zip(("dashboard", "terminal", "train"), nexts, strict=True)]
    fits = max(map(len, lines)) + 4 <= console.width
    within = [ready, *(lines if fits else ()), "Ctrl-C ends the cluster"]
    console.print(Panel.fit(Text("\n".join(within)), title="ready", border_style="green"))
    for line in () if fits else nexts:
        console.print(Text(line), soft_wrap=True)


def _print_log_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # one write a line, so that lines of several children do not mix
    sys.stderr.flush()
