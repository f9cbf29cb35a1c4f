"""Types of the compiled module. Half-precision arrays travel as uint16 views with a dtype code (ops.DTYPE_CODES)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.shard_messages import BatchFacts, CallContext, Done, Push, SyncGroup, UpdateHosted

isa: str
lookahead: str

def set_memory_limit(bytes: int) -> None: ...
def memory_limit() -> int: ...
def memory_used() -> int: ...
def reserve_ids(count: int) -> None:
    """Make room for so many ids in an index of its own. Raises OutOfMemory beyond those that it can number."""

hash_seed: int
"""Key of this process's hash tables, in [0, 2**64): an id lies at the upper bits of splitmix64(id ^ hash_seed)."""

class Refused(ValueError):
    """args are (reason, index): why a request changed nothing, and its first offending place."""

class BadId(ValueError):
    """args are (feature, place): an id that is out of range."""

class Lookup:
    def __init__(
        self,
        features: list[
            tuple[
                int, npt.NDArray[np.int64], npt.NDArray[np.int64] | int, npt.NDArray[np.float32] | None, int, int | None
            ]
        ],
        last_ids: list[int],
        threads: int,
    ) -> None: ...
    def ids_of(self, table: int) -> npt.NDArray[np.int64]: ...
    def places_of(self, feature: int) -> npt.NDArray[np.int32]: ...
    def places_among(self, table: int, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int32]) -> int: ...
    def count_occurrences(self, table: int, wanted: list[bool], out: npt.NDArray[np.uint32]) -> None: ...
    def pool(
        self, rows: list[npt.NDArray[Any]], dtypes: list[int], vectors: list[npt.NDArray[np.float32]], keep_places: bool
    ) -> None: ...
    def sum_gradients(
        self, vectors: list[npt.NDArray[np.float32] | None], rows: list[npt.NDArray[np.float32]]
    ) -> float: ...

def pool_bags(
    rows: npt.NDArray[np.float32],
    places: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32] | None,
    out: npt.NDArray[np.float32],
) -> None: ...
def spread_bags(
    vectors: npt.NDArray[np.float32],
    places: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32] | None,
    out: npt.NDArray[np.float32],
) -> None: ...
def take_largest(
    residuals: list[npt.NDArray[np.float32]],
    velocities: list[npt.NDArray[np.float32]],
    gradients: list[npt.NDArray[Any]],
    dtype_codes: list[int],
    ks: list[int],
    momentum: float,
    scale: float,
    nesterov: bool,
    estimates: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    threads: int,
) -> int: ...
def optimizer_names() -> list[str]: ...
def full_dense_table(owned_buckets: npt.NDArray[np.int64], num_rows: int, item_bytes: int) -> tuple[int, int, int]: ...

class Optimizer:
    def __init__(self, name: str, scalars: dict[str, float]) -> None: ...

class Lease:
    def __init__(self, shard: int, seconds: float, clock: Callable[[], float] | None = None) -> None: ...
    @property
    def seconds(self) -> float: ...
    def now(self) -> float: ...
    def pulse(self) -> None: ...
    def check(self) -> None: ...
    def confirm(self, began: float) -> None: ...
    def revoke(self, reason: str) -> None: ...

def boot_seconds() -> float: ...

class SyncGroups:
    def __init__(
        self,
        timeout_seconds: float,
        clock: Callable[[], float] | None = None,
        max_groups: int = ...,
        max_waiting_bytes: int = ...,
    ) -> None: ...
    def is_applied(self, write: Push | UpdateHosted) -> bool: ...
    def join(
        self, context: CallContext, write: Push | UpdateHosted
    ) -> tuple[tuple[CallContext, GeartrainError] | None, list[CallContext]]: ...
    def updates(self, update: UpdateHosted) -> list[UpdateHosted]: ...
    def complete(self, write: Push | UpdateHosted) -> None: ...
    def abandon(self, write: Push | UpdateHosted) -> None: ...
    def require_step(self, table: str, member: SyncGroup) -> None: ...
    def fence(self, job: str, incarnation: int, *, forget: bool) -> list[tuple[CallContext, GeartrainError]]: ...
    def drop_table(self, table: str) -> list[CallContext]: ...
    def steps(self) -> list[tuple[str, str, int, int]]: ...
    def restore(self, step: tuple[str, str, int, int]) -> None: ...
    def next_deadline(self) -> float | None: ...
    def expire(self) -> list[tuple[CallContext, GeartrainError]]: ...

class HeldStreams:
    """Of one moment: (name, (incarnation, oldest unacknowledged, [(sequence, created, table)])) each. Any thread."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> tuple[str, tuple[int, int, list[tuple[int, int, str]]]]: ...
    def __iter__(self) -> Iterator[tuple[str, tuple[int, int, list[tuple[int, int, str]]]]]: ...

class CompletedWrites:
    def __init__(self, max_streams: int = ..., max_forgotten: int = ...) -> None: ...
    def admit(self, context: CallContext, future: Future[Any]) -> bool: ...
    def applied(self, context: CallContext, done: Done, table: str) -> None: ...
    def failed(self, context: CallContext, error: BaseException) -> None: ...
    def dropped(self, table: str) -> None: ...
    def fence(self, job: str, incarnation: int, *, forget: bool) -> None: ...
    def require_current(self, context: CallContext) -> None: ...
    def require_possible(self, of_whom: str, incarnation: int) -> None: ...
    def hear_given(self, incarnation: int) -> None: ...
    def streams(self, tables: Iterable[str]) -> HeldStreams: ...
    def restore(self, name: str, marked: tuple[int, int, list[Any]], tables: Iterable[str]) -> None: ...
    @property
    def highest_incarnation(self) -> int: ...
    @property
    def num_forgotten_streams(self) -> int: ...

def arm_failpoints(armed: bool) -> None: ...
def reach_failpoint(name: str) -> None: ...

class RowStore:
    def __init__(
        self,
        *,
        dim: int,
        dtype: int,
        slot_dtype: int,
        optimizer: Optimizer,
        distribution: int,
        first: float,
        second: float,
        seed: int,
        table_hash: int,
        owned_buckets: npt.NDArray[np.int64],
        num_rows: int,
        threads: int,
        window: int,
        admission: float | tuple[int, int, int, int, int] | None = None,
        keeps_lives: bool = False,
        max_bytes: int = -1,
    ) -> None: ...
    def pull(
        self,
        ids: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        positions: npt.NDArray[np.int64] | None,
        present: npt.NDArray[np.uint8] | None,
    ) -> None: ...
    def push(
        self,
        ids: npt.NDArray[np.int64],
        gradients: npt.NDArray[Any],
        dtype_code: int,
        optimizer: Optimizer,
        lr: float,
        scale: float,
        ends_step: bool,
        batch: BatchFacts | None = None,
    ) -> int: ...
    def frozen_admission(
        self, start: int, most_bytes: int
    ) -> tuple[int, list[int], npt.NDArray[np.uint8], list[int], int] | None:
        """Pushes; ranges, their counters [R, B], and ids that wait in each, at the freeze, of some from ``start`` on;
        where to go on, -1: those were all. None: it admits all ids.
        """

    def restore_admission(
        self, num_pushes: int, ranges: list[int], counters: npt.NDArray[np.uint8], waiting: list[int]
    ) -> None: ...
    def refused(self) -> tuple[int, int, int, int] | None:
        """Ids that wait, gradients, occurrences, bytes of the filter; None: it admits every id."""
    def check_push(
        self,
        ids: npt.NDArray[np.int64],
        gradients: npt.NDArray[Any],
        dtype_code: int,
        optimizer: Optimizer,
        lr: float,
        scale: float,
    ) -> None: ...
    def cannot_overflow(self, largest: float, optimizer: Optimizer, lr: float, scale: float) -> bool: ...
    def make_room(self, ids: npt.NDArray[np.int64]) -> None: ...
    def make_room_to_keep(self, count: int) -> None: ...
    def assign(self, ids: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> int: ...
    def freeze(self, since: int | None) -> int: ...
    def remove(self, ids: npt.NDArray[np.int64]) -> int: ...
    def read_frozen_removed(self, from_number: int, ids: npt.NDArray[np.int64]) -> int: ...
    def note_moment(self) -> int: ...
    def forget_moment(self, moment: int) -> None: ...
    def knows_moment(self, moment: int) -> bool: ...
    @property
    def latest_moment(self) -> int: ...
    def read_frozen(
        self,
        ids: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        slots: npt.NDArray[Any] | None,
        steps: npt.NDArray[np.int64] | None,
        buckets: npt.NDArray[np.uint8] | None,
        lives: npt.NDArray[np.uint8] | None = None,
    ) -> int: ...
    def thaw(self, kept: bool) -> None: ...
    def restore(
        self,
        ids: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        slots: npt.NDArray[Any] | None,
        steps: npt.NDArray[np.int64] | None,
        lives: npt.NDArray[np.uint8] | None = None,
    ) -> int: ...
    def read_lives(
        self, position: int, ids: npt.NDArray[np.int64], lives: npt.NDArray[np.uint8] | None
    ) -> tuple[int, int]: ...
    def advance_clock(self, step: int, seconds: int) -> None: ...
    def take_leap(self) -> tuple[int, int]: ...
    @property
    def clock(self) -> tuple[int, int]: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    def step_state(self) -> tuple[int, list[float], float, float]: ...
    def adopt_steps(self, now: int, lrs: list[float], origin_ww: float, origin_vw: float) -> None: ...
    @property
    def num_present(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

def gather_rows(
    rows: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64], out: npt.NDArray[np.float32]
) -> None: ...
def update_rows(
    *,
    rows: npt.NDArray[Any],
    dtype: int,
    slots: npt.NDArray[Any] | None,
    slot_dtype: int,
    steps: npt.NDArray[np.int64] | None,
    numbers: npt.NDArray[np.int64] | None,
    gradients: npt.NDArray[np.float32],
    first_id: int,
    seed: int,
    table_hash: int,
    optimizer: Optimizer,
    lr: float,
    scale: float,
    catch_up: CatchUp | None,
) -> int: ...
def read_rows(
    *,
    rows: npt.NDArray[Any],
    dtype: int,
    slots: npt.NDArray[Any],
    slot_dtype: int,
    steps: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64] | None,
    catch_up: CatchUp,
    out: npt.NDArray[np.float32],
) -> None: ...

class StepHistory:
    def __init__(self, optimizer: Optimizer) -> None: ...
    def end_step(self, lr: float) -> None: ...
    def forget_before(self, step: int) -> None: ...
    def state(self) -> tuple[int, list[float], float, float]: ...
    def adopt(self, now: int, lrs: list[float], origin_ww: float, origin_vw: float) -> None: ...
    @property
    def moves_rows_at_rest(self) -> bool: ...
    @property
    def now(self) -> int: ...

class CatchUp:
    def __init__(self, history: StepHistory) -> None: ...
    def copy_factors(self, out: npt.NDArray[np.float64]) -> None: ...
    @property
    def num_ages(self) -> int: ...
    @property
    def now(self) -> int: ...

class Place:
    """A place in the line for a turn; it ends with the object."""

    def wait(self) -> None:
        """Until the turn has come. No signal ends it; that of :meth:`Turn.acquire` ends by what a handler raises."""

    def leave(self) -> None:
        """Give the place up, and the turn if it has come. Idempotent."""

class Turn:
    """A lock that is given in the order in which it was asked for. Waiting releases the interpreter lock."""

    def __init__(self) -> None: ...
    def try_acquire(self) -> bool: ...
    def acquire(self) -> None: ...
    def release(self) -> None: ...
    @property
    def num_waiting(self) -> int: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def enter(self) -> Place:
        """Take a place in the line, without waiting."""

class Waiter:
    """Somebody who waits for a request, and may leave."""

    def __init__(self) -> None: ...
    def leave(self) -> None:
        """What has not begun then never does."""

    @property
    def has_left(self) -> bool: ...

class ServedTable:
    """A table as an engine serves it. ``is_open``, ``torn`` and ``writes`` are changed by whoever has the turn."""

    is_open: bool
    torn: str
    writes: int
    writes_before: int
    """Those of the snapshot that it was restored from."""
    expiry_step: int
    expiry_seconds: int
    """What the table's clock must come to for somebody to look for rows that are to go."""
    @property
    def is_expiry_due(self) -> bool: ...
    @property
    def all_writes(self) -> int: ...
    @property
    def staleness(self) -> list[int]: ...
    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        rows: RowStore,
        lr: float,
        optimizer: str,
        scalars: dict[str, float],
        fixed: dict[str, str],
        is_open: bool,
    ) -> None: ...
    def require_meant(self, incarnation: int) -> None: ...
    def require_open(self, table_incarnation: int) -> None: ...
    def require_whole(self) -> None: ...
    def refusal(self, reason: int, index: int, value: int, label: str) -> GeartrainError:
        """What :class:`Refused` is to its caller."""

class Alarm:
    """When somebody looks at deadlines. Changed by whoever has the turn."""

    at: float
    def note(self, deadline: float | None) -> bool:
        """Whether that is earlier; then it is when."""

    def on_ring(self, ring: Callable[[], object]) -> None:
        """How to tell him that it is earlier than he means to look."""

class Engine:
    """What a shard does with requests for rows. Thread-safe; tables are added and removed by whoever has the turn."""

    cluster_version: int

    def __init__(
        self,
        *,
        shard: int,
        incarnation: int,
        cluster_version: int,
        lease: Lease | None,
        completed_writes: CompletedWrites,
        groups: SyncGroups,
    ) -> None: ...
    @property
    def turn(self) -> Turn: ...
    @property
    def alarm(self) -> Alarm: ...
    def check_fence(self, shard_incarnation: int, cluster_version: int) -> None: ...
    def pull(
        self,
        shard_incarnation: int,
        cluster_version: int,
        table_incarnation: int,
        table: str,
        ids: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        dtype_code: int,
        positions: npt.NDArray[np.int64] | None,
        present: npt.NDArray[np.uint8] | None,
        required_sync: SyncGroup | None,
        waiter: Waiter | None,
        has_turn: bool,
        /,
    ) -> int: ...
    def push(
        self,
        context: CallContext,
        table: str,
        ids: npt.NDArray[np.int64],
        gradients: npt.NDArray[Any],
        dtype_code: int,
        lr: float | None,
        scale: float,
        scalars: Mapping[str, float],
        group: SyncGroup | None,
        step_goes_on: bool,
        batch: BatchFacts | None,
        ids_are_distinct: bool,
        waiter: Waiter | None,
        has_turn: bool,
        /,
    ) -> Done | Future[Done]: ...
    def assign(
        self,
        context: CallContext,
        table: str,
        ids: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        dtype_code: int,
        ids_are_distinct: bool,
        waiter: Waiter | None,
        has_turn: bool,
        /,
    ) -> Done | Future[Done]: ...
    def close(self) -> None:
        """Refuse what comes from now on."""

    def fail(self, reason: str) -> None:
        """Refuse all from now on (InternalError): something of the shard is broken."""

    def end(self) -> None:
        """Refuse also what waits for the turn, which the caller has."""

    def add_table(self, table: ServedTable) -> None: ...
    def remove_table(self, name: str) -> None: ...
    def not_found(self, name: str) -> GeartrainError: ...

def exercise_engine(
    engine: Engine,
    table: str,
    ids: npt.NDArray[np.int64],
    gradients: npt.NDArray[np.float32],
    rounds: int,
    num_threads: int,
    *,
    holds_interpreter: bool,
    seconds: float,
) -> tuple[int, int]: ...
def has_bfloat16_class_pass() -> bool: ...

class ClassPass:
    def __init__(
        self,
        features: npt.NDArray[np.float32],
        *,
        logit_factor: float,
        normalised: bool,
        bfloat16: bool = False,
        weights: npt.NDArray[np.float32] | None = None,
        centers: int = 1,
    ) -> None: ...
    def forward(
        self,
        rows: npt.NDArray[np.float32],
        *,
        target_rows: npt.NDArray[np.int64],
        target_samples: npt.NDArray[np.int64],
        target_out: npt.NDArray[np.float32],
        shift: npt.NDArray[np.float32] | None,
        sum: npt.NDArray[np.float64],
        weighted: npt.NDArray[np.float32] | None,
        kept: npt.NDArray[np.float32] | None,
        threads: int = 1,
        offsets: npt.NDArray[np.float32] | None = None,
        row_sum: npt.NDArray[np.float64] | None = None,
        highest: npt.NDArray[np.float32] | None = None,
    ) -> None: ...
    def overwrite(
        self,
        rows: npt.NDArray[np.float32],
        *,
        target_rows: npt.NDArray[np.int64],
        target_samples: npt.NDArray[np.int64],
        log_sum: npt.NDArray[np.float32],
        target_weight: npt.NDArray[np.float32],
        kept: npt.NDArray[np.float32] | None,
        factor: float,
        kept_exponentials: bool = False,
        threads: int = 1,
        offsets: npt.NDArray[np.float32] | None = None,
        common: npt.NDArray[np.float32] | None = None,
    ) -> float: ...

class RunningBest:
    def __init__(
        self,
        *,
        scores: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        floors: npt.NDArray[np.float32],
        locks: npt.NDArray[np.uint8],
        keep: int,
    ) -> None: ...

def recall_pairs(
    a: npt.NDArray[np.float32],
    first_a: int,
    best_a: RunningBest | None,
    b: npt.NDArray[np.float32],
    first_b: int,
    best_b: RunningBest | None,
    *,
    same: bool,
    threads: int,
) -> None: ...
def recall_strays(
    a: npt.NDArray[np.float32],
    ids_a: npt.NDArray[np.int32],
    best_a: RunningBest,
    b: npt.NDArray[np.float32],
    first_b: int,
    *,
    threads: int,
) -> None: ...
def trim_best(best: RunningBest, *, threads: int) -> None: ...
def make_unit_rows(rows: npt.NDArray[np.float32], *, threads: int) -> int: ...
def exact_scores(
    a: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    b: npt.NDArray[np.float32],
    first_b: int,
    scores: npt.NDArray[np.float64],
    *,
    threads: int,
) -> None: ...
def exact_best(
    a: npt.NDArray[np.float32],
    ids_a: npt.NDArray[np.int32],
    b: npt.NDArray[np.float32],
    first_b: int,
    scores: npt.NDArray[np.float64],
    ids: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    *,
    threads: int,
) -> None: ...
def rank_candidates(
    scores: npt.NDArray[np.float64],
    ids: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    floors: npt.NDArray[np.float32],
    error_bound: float,
    out: npt.NDArray[np.int32],
    accepted: npt.NDArray[np.uint8],
    *,
    threads: int,
) -> None: ...
def first_outside(ids: npt.NDArray[np.int64], last: int) -> int: ...
def is_rising(ids: npt.NDArray[np.int64]) -> bool: ...
def merge_ids(ids: npt.NDArray[np.int64], distinct: npt.NDArray[np.int64], inverse: npt.NDArray[np.int64]) -> int: ...
def sum_rows(
    rows: npt.NDArray[Any], dtype_code: int, inverse: npt.NDArray[np.int64], sums: npt.NDArray[np.float32]
) -> None: ...
def route(
    ids: npt.NDArray[np.int64],
    bucket_to_shard: npt.NDArray[np.uint16],
    dense: bool,
    order: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> None: ...
def first_non_finite(values: npt.NDArray[Any], dtype_code: int) -> int: ...
def select_neighbours(
    offsets: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64 | np.int32],
    labels: npt.NDArray[np.int64],
    budget: int,
    seed: int,
    step: int,
    out: npt.NDArray[np.int64],
) -> tuple[int, int]: ...
def sample_permutation(num_ids: int, first: int, seed: int, step: int, out: npt.NDArray[np.int64]) -> None: ...
def bytes_with_room(head: bytes, room: int) -> tuple[bytes, npt.NDArray[np.uint8]]: ...

class PositionLru:
    def __init__(self, capacity: int) -> None: ...
    def find(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], touch: bool) -> None: ...
    def place(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> int: ...
    def remove(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None: ...
    def oldest(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> int: ...
    def grow(self, capacity: int) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def capacity(self) -> int: ...

def judge(
    positions: npt.NDArray[np.int64] | None,
    versions: npt.NDArray[np.int64],
    times: npt.NDArray[np.float64],
    now: float,
    dense_version: int,
    expire_seconds: float,
    max_lag: int | None,
    out_versions: npt.NDArray[np.int64],
    out_times: npt.NDArray[np.float64],
    hits: npt.NDArray[np.bool_],
    age_edges: npt.NDArray[np.float64],
    age_counts: npt.NDArray[np.int64],
    lag_counts: npt.NDArray[np.int64],
) -> tuple[int, int, int]: ...
def build_request_frame(number: int, seconds: float, operations: list[dict[str, Any]]) -> bytes: ...
def parse_request_frame(frame: bytes) -> tuple[int, float, list[dict[str, Any]]]: ...
def build_reply_frame(number: int, results: list[dict[str, Any]], room: int = 0) -> bytes: ...
def parse_reply_frame(frame: bytes, number: int, expected: list[tuple[int, int]]) -> list[dict[str, Any]]: ...
def read_damaged_frames(
    frame: bytes, is_reply: bool, number: int, num_operations: int, seed: int, count: int
) -> tuple[int, int, int]: ...

class ConnectionLost(ConnectionError):
    """A call of a DataConnection: there is no connection any more; what was sent may have been done."""

class ConnectionFull(RuntimeError):
    """A call of a DataConnection: it has no room for the call now; nothing was sent."""

class Handler:
    """What a DataServer hands its requests to."""

class EngineHandler(Handler):
    """Performs what comes over the data plane of a shard."""

    def __init__(self, engine: Engine) -> None: ...

class ToyHandler(Handler):
    def __init__(self) -> None: ...
    def await_held(self, seconds: float) -> bool: ...
    def release(self) -> None: ...
    def answer_later(self) -> int: ...
    def lose_lease(self) -> None: ...
    @property
    def num_writes(self) -> int: ...
    @property
    def sum_written(self) -> float: ...

class DataServer:
    def __init__(
        self,
        handler: Handler,
        *,
        most_mailboxes: int = ...,
        most_connections: int = ...,
        greeting_seconds: float = ...,
        silence_seconds: float = ...,
        spin_seconds: float = ...,
        most_frame_bytes: int = ...,
        most_bytes: int = ...,
        most_received_bytes: int = ...,
        host: str = "",
        port: int = 0,
        warn: Callable[[str], None] | None = None,
    ) -> None: ...
    def offer(self) -> tuple[str, bytes, int]: ...
    def close(self) -> None: ...
    @property
    def num_connections(self) -> int: ...
    @property
    def num_mailboxes(self) -> int: ...

class DataCall:
    def room(self, bytes: int) -> npt.NDArray[np.uint8]: ...
    def send(self, seconds: float = ...) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def reply(self) -> bytes: ...

CALLER_SPIN_SECONDS: float
SERVER_SPIN_SECONDS: float
"""How long an end of shared memory looks for what it waits for before it sleeps, at most."""

class DataConnection:
    def begin(self, request_bytes: int, most_reply_bytes: int) -> DataCall: ...
    def close(self) -> None: ...
    @property
    def is_lost(self) -> bool: ...
    def time_pulls(self, table: str, ids: npt.NDArray[np.int64], dim: int, count: int) -> list[int]: ...

class RingConnection(DataConnection):
    @property
    def num_mailboxes(self) -> int: ...

def connect_tcp(
    host: str,
    port: int,
    secret: bytes,
    timeout_seconds: float,
    *,
    most_frame_bytes: int = ...,
    most_in_flight_bytes: int = ...,
) -> DataConnection: ...
def connect_ring(
    socket: str,
    secret: bytes,
    timeout_seconds: float,
    *,
    spin_seconds: float = ...,
    idle_seconds: float = ...,
    answer_seconds: float = ...,
    most_pool_bytes: int = ...,
    most_mailboxes: int = ...,
) -> RingConnection: ...

class TableFacts:
    def __init__(
        self, name: str, dim: int, dtype_code: int, is_dense: bool, wire_code: int, counts_occurrences: bool = False
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def wire_code(self) -> int: ...
    @property
    def is_dense(self) -> bool: ...

class ScatteredRows:
    """Rows [N, dim] whose numbers are those of several float32 arrays [n], one array after the other; the last row ends
    with zeros. Those that lie in several arrays are copied from them when they are to be read, and back once written.
    """

    def __init__(self, arrays: tuple[npt.NDArray[np.float32], ...], dim: int) -> None: ...
    def __len__(self) -> int: ...
    def place(self, rows: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64] | None) -> None:
        """Write rows [N, dim]: those of these numbers (None: all)."""

_Writes = TypeVar("_Writes")
_Batch = tuple[npt.NDArray[np.uint32] | None, int | None, float | None, _Writes | None]
"""Occurrences [N], step, unix seconds, and the writes of each shard when its rows were pulled (-1: they were not)."""

class PreparedWrite:
    def __init__(
        self,
        client: RowsClient,
        table: TableFacts,
        ids: npt.NDArray[np.int64],
        rows: npt.NDArray[Any] | ScatteredRows,
        dtype_code: int,
        *,
        is_assign: bool,
        check: int,
        lr: float | None,
        scale: float,
        scalars: Mapping[str, float],
        group: SyncGroup | None,
        step_goes_on: bool,
        every_shard: bool,
        are_distinct: bool = False,
        batch: _Batch[Sequence[int]] | None = None,
    ) -> None: ...
    @property
    def num_parts(self) -> int: ...
    def keep_rows(self) -> None:
        """Copy the rows: from now on the caller's may change. While nobody sends it."""
    @property
    def shards(self) -> list[int]:
        """Of its parts."""

    def part(self, index: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[Any], int, _Batch[int] | None]:
        """Its shard, ids, rows (half types as uint16), the dtype code of these, and what it says of its batch."""

Undone = BaseException | bool | None
"""What the shard answered; False: no reply came in time; None: there is no way to it, or it was lost meanwhile."""

class RowsClient:
    def __init__(self, bucket_shards: npt.NDArray[np.uint16], num_shards: int) -> None: ...
    def set_way(
        self, shard: int, incarnation: int, engine: Engine | None, connection: DataConnection | None
    ) -> None: ...
    def set_cluster_version(self, version: int) -> None: ...
    def pull(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        dtype_code: int,
        present: npt.NDArray[np.uint8] | None,
        required_sync: SyncGroup | None,
        seconds: float,
        watch: Callable[[list[int]], object] | None,
        shards: Sequence[int] = ...,
    ) -> list[tuple[int, Undone]] | None:
        """None: all rows are in ``out``; else the shards whose are not. Of ``shards`` alone, unless there are none."""

    def pull_scattered(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: npt.NDArray[np.int64],
        out: ScatteredRows,
        required_sync: SyncGroup | None,
        seconds: float,
        watch: Callable[[list[int]], object] | None,
    ) -> list[tuple[int, Undone]] | None:
        """:meth:`pull` to rows of several arrays."""

    def pull_together(
        self,
        pulls: list[tuple[TableFacts, int, npt.NDArray[np.int64], npt.NDArray[Any], int]],
        seconds: float,
        watch: Callable[[list[int]], object] | None,
    ) -> list[tuple[list[tuple[int, Undone]] | None, list[int]]]:
        """:meth:`pull` of (table, incarnation, distinct ids, out, dtype code) each, and the writes that every shard had
        applied to the table; -1: it has brought no rows.
        """

    def write(
        self,
        writes: list[tuple[PreparedWrite, CallContext]],
        seconds: float,
        watch: Callable[[list[int]], object] | None,
        shards: Sequence[int] = ...,
    ) -> list[tuple[int, bool] | list[tuple[int, bool] | Undone]]:
        """For each write (created, duplicate), or for each of its parts. To ``shards`` alone, unless there are none."""

    def write_and_pull(
        self,
        prepared: PreparedWrite,
        context: CallContext,
        out: ScatteredRows,
        seconds: float,
        watch: Callable[[list[int]], object] | None,
    ) -> tuple[tuple[int, bool] | list[tuple[int, bool] | Undone], tuple[int, ...] | None]:
        """What :meth:`write` says of a push of no group, whose rows come to ``out`` as they are after it; and the
        writes that each shard with rows had applied to the table by then. None: not all rows came. Those of a shard
        that refused its part do not.
        """

    def begin_pull(
        self,
        table: TableFacts,
        table_incarnation: int,
        ids: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        dtype_code: int,
        required_sync: SyncGroup | None,
        seconds: float,
        tag: object,
    ) -> bool:
        """Send only: :meth:`next_reply` brings ``tag``. False: too much is under way, and nothing was sent."""

    def begin_write(self, prepared: PreparedWrite, context: CallContext, seconds: float, tag: object) -> bool: ...
    def next_reply(
        self, seconds: float
    ) -> tuple[Any, list[tuple[int, Undone]] | tuple[int, bool] | list[tuple[int, bool] | Undone] | None] | None:
        """The tag of a call that has come to its end, and what ``pull`` or ``write`` would say of it; None: there is
        none in so many seconds, or it was nudged. For one thread.
        """

    def waiting(self, seconds: float) -> list[int]:
        """The shards that begun calls have waited for so long. For that thread."""

    def nudge(self) -> None: ...
