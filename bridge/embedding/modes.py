"""What workers that train the same embeddings wait for: nothing, one another at each step, or those far behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from geartrain.ams.values.arguments import checked_name, integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.jobs.worker_steps import JobSteps


@dataclass(frozen=True)
class SSP:
    """Workers that wait for none that is at most ``staleness`` steps behind (stale synchronous parallel, Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013).

        fields = gt.EmbeddingGroup(cluster, "ctr", [...], mode=gt.SSP(3), reuse=True)

    Each worker pushes and pulls by itself, as in mode "async". ``rows.step()`` returns once every other worker has
    done at least as many steps as this one, less ``staleness``: so whatever it then pulls holds all pushes of all
    workers but their last ``staleness``. With 0 all do step after step together. A worker begins at its first training
    batch, at the steps of the slowest. One that died is waited for no longer than its lease
    (``stream_lease_seconds`` of the scheduler, from its last sign of life); one that is closed, not at all.

    Cost: one RPC of 100 bytes each way to the scheduler for each step.
    """

    staleness: int
    """Steps, >= 0."""
    wait_seconds: float = 600.0
    """Of a step that waits for longer, WorkerStalled names the slowest; a warning does so every now and then before."""
    worker: str | None = None
    """Name of this worker in such messages, of no other worker; None: that of ``gt.connect(stream=)``, or of host and
    process. Who is started again under a name takes the place of the process before."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        object.__setattr__(self, "staleness", integer("staleness", self.staleness, 0))
        if not real_number("wait_seconds", self.wait_seconds) > 0:
            raise InvalidArgument(f"wait_seconds is {self.wait_seconds!r}; it must be > 0")
        if self.worker is not None:
            checked_name("worker", self.worker)


Mode = Literal["async", "sync"] | SSP


def checked_mode(mode: Mode) -> Mode:
    """Raise InvalidArgument unless it is a mode."""
    if mode not in ("async", "sync") and not isinstance(mode, SSP):
        raise InvalidArgument(f"mode is {quoted(mode)}; it must be 'async', 'sync' or gt.SSP(staleness=3)")
    return mode


class BoundedLead:
    """The :class:`~geartrain.bridge.rows.pending.Pace` of :class:`SSP`."""

    def __init__(self, cluster: Cluster, job: str, mode: SSP) -> None:
        self.steps: JobSteps = cluster.job_steps(job, worker=mode.worker)
        self._mode = mode
        self._waits = False
        """Whether the wait of a step ended with an error: the next call goes on with it."""

    @property
    def oldest(self) -> int:
        """All that was written before this step must be in the rows of the next look-up."""
        return self.steps.done - self._mode.staleness

    def join(self) -> None:
        """Be waited for from now on."""
        self.steps.join()

    def step_done(self) -> None:
        """Tell that a step is done, then wait for those that are too far behind."""
        if not self._waits:
            self.steps.step_done()
        self._waits = True
        self.steps.wait(self._mode.staleness, self._mode.wait_seconds)
        self._waits = False
