"""``geartrain failpoints``: the places at which a test can make a process die, wait or fail."""

from __future__ import annotations

import json

from geartrain.ams.observe.failpoints import ACTIONS, FAILPOINTS, VARIABLE
from geartrain.cli.shared.consoles import print_table
from geartrain.cli.shared.options import Json


def failpoints(as_json: Json = False) -> None:
    """List the failpoints, for tests of what becomes of the data when a process dies or a disk fails.

    GEARTRAIN_FAILPOINTS="shard.apply.after=kill@3;file.sync.before=error(ENOSPC)" arms them in the processes that
    inherit it: name=action, and @n for the n-th pass alone. Actions: kill, exit, stop, sleep(SECONDS), pause(FILE),
    error. Refused where the configuration says mode: production.
    """
    if as_json:
        listed = [
            {"name": name, "where": failpoint.where, "error": failpoint.fails_with and failpoint.fails_with.__name__}
            for name, failpoint in FAILPOINTS.items()
        ]
        print(json.dumps({"variable": VARIABLE, "actions": ACTIONS, "failpoints": listed}))
        return
    rows = [
        (name, failpoint.where, failpoint.fails_with.__name__ if failpoint.fails_with else "none")
        for name, failpoint in FAILPOINTS.items()
    ]
    print_table(("name", "where", "error"), rows)
