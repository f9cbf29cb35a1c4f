"""Servers that share a machine, or a container, share what their rows may take."""

from __future__ import annotations

import re

from tests.integration.commands.test_up import started


def test_servers_of_one_machine_divide_its_memory() -> None:
    with started("--shards=2", "--scheduler-listen=127.0.0.1:0") as process:
        assert process.stderr is not None
        taken: dict[tuple[str, str], int] = {}
        while len(taken) < 4:
            line = process.stderr.readline()
            assert line, "it ended"
            if found := re.search(r"(server \d) .*rows may take (\d+) MiB(: the memory is that of 2 shards|)", line):
                taken[found[1], "half" if found[3] else "whole"] = int(found[2])
        assert taken["server 0", "half"] == taken["server 1", "half"] <= taken["server 0", "whole"] // 2
