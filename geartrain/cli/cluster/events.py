"""``geartrain events``: the event log of a cluster's scheduler."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from geartrain.ams.values.text import printable
from geartrain.cli.shared.clusters import settings
from geartrain.cli.shared.options import ConfigFile, SchedulerAddress

if TYPE_CHECKING:
    from geartrain.ams.values.scheduler_messages import ClusterEvent, EventPage

_ASK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_SHOWN, _READ = 50, 500


def events(
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with events as they come, until Ctrl-C.")] = False,
    since: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of an event: print those behind it; 0: all.", show_default=f"the last {_SHOWN}"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print the events of a cluster: shards lost and back, tables made and dropped, snapshots, restores, jobs.

    The scheduler keeps the newest 10,000; with a data folder (scheduler.data) they survive its restart, in the file
    events.jsonl there. --follow continues after a restart.
    """
    config = settings(file, scheduler)
    from geartrain.ams.observe.event_log import as_json as fields_of
    from geartrain.ams.rpc.carrier import AttemptFailed, remedy
    from geartrain.ams.rpc.client.dial import dial
    from geartrain.ams.values.errors import SchedulerUnavailable
    from geartrain.ams.values.scheduler_messages import ReadEvents
    from geartrain.watch.events import EventReader, folded

    def read(since: int) -> EventPage:
        return carrier.call(ReadEvents(since=since), _ANSWER_SECONDS)

    carrier, _ = dial(config.server.scheduler, config.client, once=True)
    try:
        reader = EventReader(read, since=since, most=_READ, forgot=_forgot)
        new = reader.new if as_json else lambda: folded(reader.new())
        first = list(new())  # raises at once if the scheduler has never answered
        first = first[-_SHOWN:] if since is None else first
        for event in chain(first, _followed(new)) if follow else first:
            print(json.dumps(fields_of(event)) if as_json else line_of(event), flush=True)
    except AttemptFailed as exc:
        raise SchedulerUnavailable(f"{exc}; {remedy(exc)}") from None
    except KeyboardInterrupt:
        pass
    finally:
        carrier.close()


def line_of(event: ClusterEvent, *, is_brief: bool = False) -> str:
    """Return an event as a line of text in local time; ``is_brief`` leaves out its number and day."""
    moment = datetime.fromtimestamp(event.unix_seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")
    job = f" [{event.job}]" if event.job else ""
    when = moment[11:19] if is_brief else f"{event.number:>6} {moment[:23]}"
    line = printable(f"{when} {event.kind:<15}{job} {event.text}")
    return line.replace("\n", " ")  # otherwise a client's text could look like events


def _followed(new: Callable[[], Iterable[ClusterEvent]]) -> Iterator[ClusterEvent]:
    """Yield all events from then on; once the scheduler has answered, wait while it is away."""
    from geartrain.ams.rpc.carrier import AttemptFailed

    is_silent = False
    while True:
        try:
            yield from new()
            is_silent = False
        except AttemptFailed as exc:
            if not is_silent:
                print(f"{printable(str(exc))}; waiting until it does", file=sys.stderr)
            is_silent = True
        time.sleep(_ASK_SECONDS)


def _forgot(last: int, since: int) -> None:
    said = f"the scheduler has {last} events and none behind {since}"
    print(f"{said}: it was restarted without its memory, if it had so many; from the first on", file=sys.stderr)
