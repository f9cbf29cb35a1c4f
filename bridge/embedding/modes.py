"""Consistency of workers that train the same embeddings: asynchronous, synchronous, or stale synchronous (SSP)."""

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
    """Mode of workers that run at most ``staleness`` steps ahead of the slowest (stale synchronous parallel, Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013).

        fields = gt.EmbeddingGroup(cluster, "ctr", [...], mode=gt.SSP(3), reuse=True)

    Each worker pushes and pulls by itself, as in mode "async". ``rows.step()`` returns once every other worker has
    done at least as many steps as this one, less ``staleness``: so rows pulled then contain all pushes of all
    workers but their last ``staleness``. With 0 all workers step in lockstep. A worker joins at its first training
    batch, at the step of the slowest. The others wait for a dead worker until its lease expires
    (``stream_lease_seconds`` of the scheduler, from its last sign of life), and not for a closed one.

    Cost: one RPC of 100 bytes each way to the scheduler for each step.
    """

    staleness: int
    """Steps, >= 0."""
    wait_seconds: float = 600.0
    """Longest wait of a step, in seconds: then WorkerStalled names the slowest worker. Warnings name it before."""
    worker: str | None = None
    """Unique name of this worker in such messages; None: that of ``gt.connect(stream=)``, or of host and process. A
    process started under the same name replaces the earlier one."""

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidArgument."""
        object.__setattr__(self, "staleness", integer("staleness", self.staleness, 0))
        if not real_number("wait_seconds", self.wait_seconds) > 0:
            raise InvalidArgument(f"wait_seconds is {self.wait_seconds!r}; it must be > 0")
        if self.worker is not None:
            checked_name("worker", self.worker)


Mode = Literal["async", "sync"] | SSP


def checked_mode(mode: Mode) -> Mode:
    """Return the mode. Raises InvalidArgument for another value."""
    if mode not in ("async", "sync") and not isinstance(mode, SSP):
        raise InvalidArgument(f"mode is {quoted(mode)}; it must be 'async', 'sync' or gt.SSP(staleness=3)")
    return mode


class BoundedLead:
    """The :class:`~geartrain.bridge.rows.pending.Pace` of :class:`SSP`."""

    def __init__(self, cluster: Cluster, job: str, mode: SSP) -> None:
        self.steps: JobSteps = cluster.job_steps(job, worker=mode.worker)
        self._mode = mode
        self._waits = False
        """Whether the wait of a step ended with an error; the next call resumes it."""

    @property
    def oldest(self) -> int:
        """Step before which all writes must be in the rows of the next look-up."""
        return self.steps.done - self._mode.staleness

    def join(self) -> None:
        """Register, so that the other workers wait for this one."""
        self.steps.join()

    def step_done(self) -> None:
        """Report a finished step, then wait for workers that are too far behind."""
        if not self._waits:
            self.steps.step_done()
        self._waits = True
        self.steps.wait(self._mode.staleness, self._mode.wait_seconds)
        self._waits = False
