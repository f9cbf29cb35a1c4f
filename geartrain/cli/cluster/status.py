"""``geartrain status`` and ``geartrain health``: the state of a cluster, and whether one role serves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geartrain.ams.values.config import ClusterConfig, identify_as_role, split_address
from geartrain.ams.values.errors import AccessDenied, Busy, ConfigError, GeartrainError
from geartrain.ams.values.rpc import Ping, Pong
from geartrain.ams.values.text import counted, lasting, printable, sized
from geartrain.cli.cluster.table import why_incomplete
from geartrain.cli.shared.clusters import settings
from geartrain.cli.shared.consoles import HEALTH_COLOURS, print_table, table_console
from geartrain.cli.shared.options import ConfigFile, GraphAddress, Json, SchedulerAddress
from geartrain.launch.roles import ROLES, Report, load

if TYPE_CHECKING:
    from geartrain.ams.client.cluster_status import ClusterStatus
    from geartrain.ams.values.gear_messages import GearState
    from geartrain.ams.values.scheduler_messages import JobEntry

_PING_SECONDS = 2.0


def status(
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Show shards, tables, jobs and slow gears of a running cluster, and its graphs with --graph; each role with its
    process, version and uptime. Exits with 1 if the cluster is not ready."""
    config = settings(file, scheduler, graph)
    identify_as_role(config.server.scheduler)
    found = [load(role.report)(config) for role in ROLES.values() if role.report is not None]
    reports: list[Report] = [report for report in found if report is not None]
    pongs = _pongs({address: role for report in reports for address, role in report.addresses.items()})
    if as_json:
        facts = {key: value for report in reports for key, value in report.facts.items()}
        for shard in facts["shards"]:
            shard["pid"] = None if (pong := pongs.get(shard["address"])) is None else pong.pid
        told = [{"address": address, **dataclasses.asdict(pong)} for address, pong in pongs.items()]
        print(json.dumps({**facts, "roles": told, "insecure": _is_insecure(config.server.scheduler)}))
    else:
        for report in reports:
            report.show(pongs)
    complaints = [complaint for report in reports for complaint in report.complaints]
    for complaint in complaints:
        print(printable(complaint), file=sys.stderr)
    if complaints or not all(report.ready for report in reports):
        raise typer.Exit(1)


def _is_insecure(address: str) -> bool:
    """Return whether this process has no certificates for ``address``; roles with certificates then refuse it."""
    from geartrain.ams.rpc.credentials import Credentials

    return not Credentials.mine(address).names


def _pongs(addresses: Mapping[str, str]) -> dict[str, Pong]:
    """Ping all roles at once; return the answers by address. A role of an earlier version answers nothing."""
    from geartrain.ams.rpc.carrier import AttemptFailed
    from geartrain.ams.rpc.client.calls import GrpcCalls

    calls = {address: GrpcCalls(ROLES[role].rpc_service(), "role", address) for address, role in addresses.items()}
    pending = {address: call.start(Ping(), _PING_SECONDS) for address, call in calls.items()}
    pongs = {}
    for address, pong in pending.items():
        with contextlib.suppress(AttemptFailed, GeartrainError):
            pongs[address] = pong()
        calls[address].close()
    return pongs


def age(pong: Pong | None) -> str:
    """Return a role's process in words: `` (pid 12, version 0.1.0, up 12 s)``."""
    return (
        ""
        if pong is None
        else f" (pid {pong.pid}, version {printable(pong.version)}, up {lasting(pong.uptime_seconds)})"
    )


def report_of_cluster(config: ClusterConfig) -> Report:
    """Return the report about the scheduler, its servers and tables."""
    from geartrain.ams.client.cluster_status import cluster_status, scheduler_jobs
    from geartrain.watch.polls import health_of

    address = config.server.scheduler
    found = cluster_status(address, config=config.client)
    jobs: tuple[JobEntry, ...] = ()
    with contextlib.suppress(AccessDenied):  # the token lacks the right to read
        jobs = scheduler_jobs(address, config=config.client)

    def show(pongs: Mapping[str, Pong]) -> None:
        _print_tables(found, address, pongs)
        for job in jobs:
            print("\n".join(job_lines(job)))

    addresses = {shard.address: "server" for shard in found.shards if shard.address} | {address: "scheduler"}
    return Report(
        addresses=addresses,
        facts=dataclasses.asdict(found) | {"health": health_of(found), "jobs": [_job_facts(job) for job in jobs]},
        show=show,
        ready=found.ready,
    )


def _job_facts(job: JobEntry) -> dict[str, Any]:
    facts = dataclasses.asdict(job)
    return {"job": facts.pop("job"), **facts.pop("report"), **facts}


def job_lines(job: JobEntry) -> Iterator[str]:
    """Yield the state of a job, in lines that fit a terminal."""
    report = job.report
    state = f"silent for {lasting(job.heard_seconds_ago)}" if report.state == "silent" else report.state
    step = f"step {report.step:,}"
    if report.last_step:
        step += f" of {report.last_step:,} ({100 * report.step // report.last_step} %)"
    left = ""
    if report.state in ("training", "saving") and report.last_step and report.steps_per_second:
        left = f", {lasting((report.last_step - report.step) / report.steps_per_second)} left"
    yield printable(f"{job.job}: {state}, {step}, {lasting(job.step_seconds_ago)} ago{left}")
    numbers = [] if report.loss is None else [f"loss {report.loss:.4f}"]
    if report.metric_value is not None:
        numbers.append(f"{report.metric} {report.metric_value:.4f}")
    if report.steps_per_second:
        numbers += [f"{report.steps_per_second:,.1f} steps/s", f"{report.samples_per_second:,.0f} samples/s"]
    if report.pull_ms is not None and report.push_ms is not None:
        numbers.append(f"pull {report.pull_ms:.1f} + push {report.push_ms:.1f} ms")
    if numbers:
        yield printable(f"  {', '.join(numbers)}")
    if report.metrics:
        yield printable(f"  {', '.join(f'{name} {value:.4f}' for name, value in report.metrics.items())}")
    saved = "no snapshot"
    if job.snapshot_step is not None and job.snapshot_seconds_ago is not None:
        saved = f"snapshot of step {job.snapshot_step:,}, {lasting(job.snapshot_seconds_ago)} ago"
    every = f", every {lasting(report.snapshot_every_seconds)}" if report.snapshot_every_seconds else ""
    failed = ", ".join(f"{number} {reason}" for reason, number in job.snapshot_failures.items())
    yield printable(f"  {saved}{every}" + (f"; failed: {failed}" if failed else ""))
    if job.recoveries:
        yield f"  went back {counted(job.recoveries, 'time')}, {counted(job.steps_lost, 'step')} lost"


def report_of_gears(config: ClusterConfig) -> Report:
    """Return the report about the slow gears that hold partitions of a dense part."""
    from geartrain.ams.client.cluster_status import slow_gear_status

    gears, silent = slow_gear_status(config.server.scheduler, config=config.client)

    def show(pongs: Mapping[str, Pong]) -> None:
        for name in sorted({gear.name for gear in gears}):
            print(f"slow gears of {printable(name)}")
            named = [gear for gear in gears if gear.name == name]
            for gear in named:
                print(f"  {gear_line(gear)}{age(pongs.get(gear.address))}")
            if lost := lost_gradients(named):
                print(f"  lost with slow gears that died: {counted(lost, 'gradient')}")

    addresses = {gear.address: "slowgear" for gear in gears}
    facts = {"slow_gears": [dataclasses.asdict(gear) for gear in gears]}
    return Report(addresses=addresses, facts=facts, show=show, complaints=silent)


def lost_gradients(gears: list[GearState]) -> int:
    """Return the lost gradients of all fast gears, as they reported them to the slow gears of one dense part."""
    heard: dict[str, int] = {}
    for gear in gears:
        for source, lost in gear.lost.items():
            heard[source] = max(lost, heard.get(source, 0))
    return sum(heard.values())


def gear_line(gear: GearState) -> str:
    """Return a line about one slow gear: its partitions, its cache, and its received, applied and lost gradients."""
    asked = gear.cache_hits + gear.cache_misses
    rate = f"{100 * gear.cache_hits / asked:.0f} % of {asked:,} from its cache" if asked else "no feature asked for"
    account = gear.account
    dropped = account.dropped_stale + account.dropped_failed + account.non_finite
    error = f"; does not apply what is due: {printable(gear.error)}" if gear.error else ""
    return (
        f"{printable(gear.address)}: {counted(len(gear.partitions), 'partition')}, dense version {gear.dense_version}, "
        f"{rate}, {gear.queued_ids} ids queued; gradients: {account.received:,} received, {account.applied:,} applied, "
        f"{account.waiting:,} waiting, {account.due:,} due, {dropped:,} dropped{error}"
    )


def health(
    address: Annotated[
        str, typer.Argument(help=f"host:port of a role: {', '.join(role.title for role in ROLES.values())}.")
    ],
    service: Annotated[
        str, typer.Option(help="What it shall be ready for: ready, shards, complete, restored; by default: to answer.")
    ] = "",
    timeout_seconds: Annotated[float, typer.Option(min=0, help="How long to wait for an answer.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Check whether one role serves (gRPC health protocol); exits with 1 if it does not, with the reason on stderr.

    A scheduler serves even while shards are absent. --service asks for more: "shards" (all are up), "complete"
    (no table has lost rows), "restored" (no table is being restored), "ready" (all of these). Servers know "restored"
    and "ready".
    """
    from geartrain.ams.rpc.client.health import why_not_serving

    split_address(address)
    if service not in ("", "ready", "shards", "complete", "restored"):
        raise ConfigError(f"--service is {service!r}; it must be ready, shards, complete or restored")
    identify_as_role(address)
    reason = why_not_serving(address, timeout_seconds, service)
    if reason:
        reason = _why_no_service_of_models(address, timeout_seconds, reason)
    facts = {"address": address, "serving": not reason} | ({"service": service} if service else {})
    what = f"{address}{f' ({service})' if service else ''}"
    print(json.dumps(facts | {"reason": reason}) if as_json else f"{what}: {'not ' if reason else ''}serving")
    if reason:
        print(printable(reason), file=sys.stderr)
        raise typer.Exit(1)


def _why_no_service_of_models(address: str, timeout_seconds: float, otherwise: str) -> str:
    """Return why a model service, which speaks HTTP, is not ready ("": it is); ``otherwise`` if none answers."""
    from geartrain.serving.http.client import request_json

    try:
        request_json(address, "GET", "/readyz", timeout_seconds=max(timeout_seconds, 0.1))
    except Busy as exc:
        return str(exc)
    except (GeartrainError, OSError):
        return otherwise
    return ""


def _print_tables(found: ClusterStatus, address: str, pongs: Mapping[str, Pong]) -> None:
    from rich.text import Text

    from geartrain.ams.client.scheduler_calls import remedy_for_absent
    from geartrain.watch.polls import health_of

    console = table_console()
    up = sum(shard.state == "up" for shard in found.shards)
    insecure = " · insecure: no certificates" if _is_insecure(address) else ""
    shards = f"{up} of {counted(found.num_shards, 'shard')} up"
    health, rest = health_of(found), f": scheduler {address}{age(pongs.get(address))} · {shards}{insecure}"
    console.print(Text.assemble((health, HEALTH_COLOURS[health]), rest))
    told = {shard.address: pongs.get(shard.address) for shard in found.shards}
    print_table(
        ("shard", "state", "address", "rows", "memory", "limit", "CPU s", "up", "beat s ago", "pid", "version"),
        [
            (
                str(shard.shard),
                shard.state,
                printable(shard.address),
                f"{shard.rows:,}",
                sized(shard.memory_bytes),
                sized(shard.memory_limit_bytes) if shard.memory_limit_bytes else "",
                f"{shard.cpu_seconds:,.1f}",
                lasting(shard.uptime_seconds),
                "" if shard.state == "missing" else f"{shard.heartbeat_age_seconds:.1f}",
                *((str(pong.pid), printable(pong.version)) if (pong := told[shard.address]) else ("", "")),
            )
            for shard in found.shards
        ],
    )
    if up < found.num_shards:
        advice = remedy_for_absent((shard.state for shard in found.shards), address)
        console.print(f"{counted(found.num_shards - up, 'shard')} not up: {advice}")
    if found.tables:
        some_went = any(entry.expired or entry.evicted for entry in found.tables)
        print_table(
            ("table", "dim", "ids", "rows", "memory", "writes", *(("expired", "evicted") if some_went else ())),
            [
                (
                    entry.name,
                    str(entry.dim),
                    "any" if entry.num_rows is None else f"{entry.num_rows:,}",
                    f"{entry.rows:,}",
                    sized(entry.memory_bytes),
                    f"{entry.writes:,}",
                    *((f"{entry.expired:,}", f"{entry.evicted:,}") if some_went else ()),
                )
                for entry in found.tables
            ],
        )
    for name in found.incomplete_tables:
        console.print(f"table {name}: {why_incomplete(found, name)}")
