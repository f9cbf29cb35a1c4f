"""One process from which roles, jobs and ranks are forked in milliseconds: it has imported what they need.

A process has one such server for all its children, and it imports its list when the first is started: so there is
one list.
"""

from __future__ import annotations

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.support.preloaded"])
