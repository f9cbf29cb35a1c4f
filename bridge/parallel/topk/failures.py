"""Errors of a failed gradient exchange; every rank raises one."""

from __future__ import annotations

from typing import NoReturn

from torch.autograd import Variable

from geartrain.ams.values.errors import InvalidArgument, NonFinite, SpecMismatch, SyncError


def require_alike(answers: list[list[int]], failure: Exception | None) -> None:
    """Raise on every rank if one failed before a backward pass, or if ranks have different gradient states."""
    if failure is not None:
        raise failure
    are_well, loaded, steps = zip(*answers, strict=True)
    if not all(are_well):
        raise not_exchanged(are_well.index(0))
    if len({*loaded}) > 1 or len({*steps}) > 1:
        other = next(rank for rank, answer in enumerate(answers) if answer != answers[0])
        raise SpecMismatch(
            f"rank 0 and rank {other} go on from different gradient states, after {steps[0]} and {steps[other]} steps"
            + "".join(f"; rank {rank} alone loaded one" for rank in (0, other) if not loaded[other - rank])
            + ". Call load_state_dict() with the same state on every rank"
        )


def not_exchanged(rank: int) -> SyncError:
    """Return the error that other ranks raise if ``rank`` failed."""
    return SyncError(f"gradients were not exchanged: rank {rank} failed; its error tells why")


def not_stepped(rank: int) -> InvalidArgument:
    """Return the error for a backward pass before the gradients of the last one were applied."""
    return InvalidArgument(
        f"backward() exchanged gradients on rank {rank} before optimizer.step() had applied the last ones, which would "
        "be lost; step after each backward(), or accumulate under model.no_sync()"
    )


def no_more_batches() -> InvalidArgument:
    """Return the error of a rank that has left its loop while others step."""
    return InvalidArgument(
        "this rank has no more batches, and others have: in model.join() it would send zeros, and never what it "
        "keeps. Give every rank as many batches: DistributedSampler pads or drops the last ones"
    )


def not_finite(name: str, rank: int | None, *, of_state: bool) -> NonFinite:
    """Return the error for the parameter ``name``.

    ``of_state``: the optimizer state is not finite, or would overflow; otherwise the gradient. ``rank`` None: unknown.
    """
    where = "" if rank is None else f" on rank {rank}"
    if of_state:
        return NonFinite(
            f"the momentum or the residual of parameter {name!r} holds NaN or infinity{where}, or would exceed float32 "
            "with its gradient, which is finite; no parameter was changed. Go on from a state with load_state_dict()"
        )
    return NonFinite(
        f"the gradient of parameter {name!r} holds NaN or infinity{where}; no parameter was changed. Lower the "
        "learning rate, give a GradScaler to attach(), and go on from a state with load_state_dict()"
    )


def raise_after_backward(failure: Exception) -> None:
    """Make ``backward()`` raise ``failure`` unchanged, once DDP has ended its pass and can begin another."""
    queue = Variable._execution_engine.queue_callback

    def fail() -> NoReturn:
        raise failure

    queue(lambda: queue(fail))  # DDP queues the end of its pass after this hook, so between the two
