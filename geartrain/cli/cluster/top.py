"""``geartrain top``: shards, jobs and the last events of a cluster, refreshed each second."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.text import printable, sized
from geartrain.cli.shared.clusters import settings
from geartrain.cli.shared.options import ConfigFile, SchedulerAddress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from geartrain.ams.values.config import ClusterConfig
    from geartrain.ams.values.scheduler_messages import ClusterEvent
    from geartrain.watch.polls import ClusterPoll

_ASK_SECONDS = 1.0
_SHOWN_EVENTS = 10


def top(file: ConfigFile = None, scheduler: SchedulerAddress = None) -> None:
    """Show jobs, the last events, and shards with their rows and writes, refreshed each second until q or Ctrl-C.

    Prints once where stdout is no terminal.
    """
    config = settings(file, scheduler)
    from rich.live import Live

    from geartrain.cli.shared.consoles import table_console

    console = table_console()
    view = _View(config)
    shown = view.now()
    if not console.is_terminal:
        console.print(shown)
        return
    screen = Live(shown, console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), _single_keys(), screen as live:
        while not _asked_to_end():
            try:
                shown = view.now()
                live.update(shown, refresh=True)
            except GeartrainError as exc:  # the cluster may come back
                live.update(_stale(shown, exc), refresh=True)


def _stale(shown: RenderableType, exc: GeartrainError) -> RenderableType:
    """Return the last view, dimmed, below the reason why it is out of date."""
    from rich.console import Group
    from rich.styled import Styled
    from rich.text import Text

    said = printable(f"{exc}; asked again until it answers (q ends); below: as it was before")
    return Group(Text(said, style="bold"), Styled(shown, "dim"))


class _View:
    """Builds the view, with the number of writes since the last one."""

    def __init__(self, config: ClusterConfig) -> None:
        from geartrain.watch.polls import ClusterWatch

        self._watch = ClusterWatch(config, _SHOWN_EVENTS)
        self._newest: deque[ClusterEvent] = deque(maxlen=_SHOWN_EVENTS)

    def now(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from geartrain.cli.cluster.events import line_of
        from geartrain.cli.cluster.status import job_lines
        from geartrain.cli.shared.consoles import HEALTH_COLOURS, table_of
        from geartrain.watch.events import folded
        from geartrain.watch.polls import health_of

        look = self._watch.poll()
        found = look.status
        self._newest.extend(folded(look.events))
        up = sum(shard.state == "up" for shard in found.shards)
        health, rest = (
            health_of(found),
            f": {up} of {found.num_shards} shards up, cluster version {found.cluster_version}",
        )
        parts: list[Any] = [
            Text.assemble(f"{self._watch.address} ", (health, HEALTH_COLOURS[health]), rest, " · q ends")
        ]
        headers = (
            "shard",
            "state",
            "address",
            "rows",
            "memory",
            "of limit",
            "CPU",
            "calls/s",
            "writes/s",
            "beat s ago",
        )
        lines = [line for job in look.jobs for line in job_lines(job)]
        lines += [line_of(event, is_brief=True) for event in self._newest]
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        # last: of a hundred shards, those that are not up are shown
        parts.append(table_of(headers, _shard_rows(look), expand=True))
        return Group(*parts)


def _shard_rows(look: ClusterPoll) -> Iterator[tuple[str, ...]]:
    from geartrain.watch.polls import Rates

    for shard in sorted(look.status.shards, key=lambda shard: shard.state == "up"):
        rate = look.rates.get(shard.shard, Rates())
        age = "" if shard.state == "missing" else f"{shard.heartbeat_age_seconds:.1f}"
        limit = shard.memory_limit_bytes
        held = (
            f"{shard.rows:,}",
            sized(shard.memory_bytes),
            f"{100 * shard.memory_bytes / limit:.1f} %" if limit else "",
        )
        busy = f"{100 * rate.cpu:.0f} %", f"{rate.calls:,.0f}", f"{rate.writes:,.0f}"
        yield str(shard.shard), shard.state, printable(shard.address), *held, *busy, age


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys as they are typed, without echo."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _asked_to_end() -> bool:
    """Wait until the next refresh; return True if q was typed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(_ASK_SECONDS)
        return False
    if not select.select([sys.stdin], [], [], _ASK_SECONDS)[0]:
        return False
    typed = os.read(sys.stdin.fileno(), 64)
    return not typed or b"q" in typed.lower()
