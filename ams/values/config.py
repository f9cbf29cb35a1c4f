"""What each role may be told, as frozen typed models: one section a role, one field a fact, a docstring each.

Models only: files, environment and flags are read in ``geartrain.launch.configuration``. A value outside its range
raises :class:`ConfigError` on construction, so a role never starts with a setting it cannot honour. Units are in the
names.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import platformdirs
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from geartrain.ams.values.errors import ConfigError

MIB = 1 << 20
MAX_MESSAGE_BYTES = 64 * MIB
MAX_SHARDS = 4096
"""As many as there are buckets."""
MAX_CPUS = 8192
"""As many as Linux can be built for."""
HEADER_BYTES = MIB
"""What a message may hold beside its rows."""


_GRPC_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "google-c2p")
"""What gRPC reads before a colon as the kind of an address: ``unix:7000`` is a socket in a folder, no host."""


TOKEN_PREFIX = "gt1."
"""How the tokens of jobs begin."""
_TOKEN_REMEDY = (
    "others see addresses, arguments and settings: write it into a file of your own (chmod 600), and name that in "
    "security.token (GEARTRAIN_SECURITY__TOKEN)"
)

_TOKEN = re.compile(r"gt1\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")


def split_address(address: str) -> tuple[str, int]:
    """Split ``"host:port"`` or ``"[ipv6]:port"`` into host and port (0 … 65535).

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(address, str) and TOKEN_PREFIX in address:  # not to be shown
        raise ConfigError(f"the address has a token in it; {_TOKEN_REMEDY}")
    if not isinstance(address, str):
        raise ConfigError(f"address is {address!r}; it must be a text of the form 'host:port', as '127.0.0.1:7000'")
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif "//" in host:
        raise ConfigError(f"address {address!r} is a URL; leave out {host.partition('//')[0]}//, as '127.0.0.1:7000'")
    elif ":" in host:
        raise ConfigError(f"address {address!r} has a bare IPv6 host; write it in brackets, as '[::1]:7000'")
    if not colon or not host or host != host.strip() or "/" in host:
        raise ConfigError(f"address {address!r} is not of the form 'host:port', for example '127.0.0.1:7000'")
    if not _HOST.fullmatch(host):  # what one process tells another is printed for people: no escape sequences
        raise ConfigError(f"address {address!r} has host {host!r}; it must be a name of letters, digits, .-_ or an IP")
    if host in _GRPC_SCHEMES:
        raise ConfigError(f"address {address!r} has host {host!r}, which gRPC takes for a kind of address; use another")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ConfigError(f"address {address!r} has port {port!r}; a port is a number from 0 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """What :func:`split_address` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach ``"host:port"``."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


FOLDER_VARIABLE = "GEARTRAIN_SECURITY__FOLDER"
NO_FOLDER = "none"
CLIENT = "client"
CERTIFIED_ROLES = ("scheduler", "server", "graph", "slowgear", "serve", CLIENT)
"""Who has a certificate of its own; all that serve nobody are clients."""

TOKEN_VARIABLE = "GEARTRAIN_SECURITY__TOKEN"

_identity: tuple[str, str] | None = None
_token: str | None = None


def identify(folder: str | None, role: str = CLIENT, token: str | None = None) -> None:
    """Let this process show others the certificate of ``role`` in ``folder``, from its next connection on.

    None: as the environment says, as it does for a program that was told nothing. A process is one to all others.
    ``token`` is the file of its token; None: as the environment says.
    """
    global _identity, _token
    _identity = None if folder is None else (folder, role)
    _token = token


def identify_as_role(address: str) -> None:
    """Let this process be a role whose certificate its folder has, where that has none of a client.

    For what a role may ask, too: whether others serve, and of whom the cluster is made.
    """
    folder, role = identity(address)
    if folder is not None and not (Path(folder) / f"{role}.pem").exists():
        identify(folder, next((found for found in CERTIFIED_ROLES if (Path(folder) / f"{found}.pem").exists()), role))


def token_path() -> str | None:
    """The file of the token of this process; None: it has none. Raises ConfigError."""
    return SecurityConfig(token=_token or os.environ.get(TOKEN_VARIABLE) or None).token


def require_no_token(arguments: Iterable[str]) -> None:
    """Raises ConfigError if there is a token among the words of a command, where everybody sees it."""
    if any(TOKEN_PREFIX in argument and _TOKEN.search(argument) for argument in arguments):
        raise ConfigError(
            f"there is a token among the arguments; have another made, revoke this one, and {_TOKEN_REMEDY}"
        )


def is_identified() -> bool:
    """Whether this process was told which certificates it has, or that it has none."""
    return bool(_identity or os.environ.get(FOLDER_VARIABLE))


def identity(address: str) -> tuple[str | None, str]:
    """Return (folder of certificates, or None: there are none; role) of this process for the two ends of ``address``.

    On loopback a process that was told of no folder has the private one of its user, once there is one.
    """
    folder, role = _identity or (os.environ.get(FOLDER_VARIABLE) or None, CLIENT)
    if folder is None and is_loopback(address) and private_folder().is_dir():
        return str(private_folder()), CLIENT
    return (None if folder is None or folder == NO_FOLDER else str(Path(folder).expanduser())), role


def private_folder() -> Path:
    """Where the certificates of clusters of this user on this machine are: in ``client.pem``, good for every role."""
    return platformdirs.user_data_path("geartrain") / "security"


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """Say which of the ``known`` keys was probably meant, else list them all."""
    known = list(known)
    close = difflib.get_close_matches(unknown, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(sorted(known))}"


def _listen_address(value: str) -> str:
    split_address(value)
    return value


def _target_address(value: str) -> str:
    _, port = split_address(value)
    if port == 0:
        raise ConfigError(
            f"address {value!r} has port 0, where nobody can be reached; give the port the role listens on"
        )
    return value


def _text_list(value: object) -> object:
    """Split ``"7001,7002"`` or ``"my_package.rules,other.rules"``, as a flag or a variable of the environment says it;
    one number is a list, too."""
    if isinstance(value, int):
        return (value,)
    return value.strip("[]").split(",") if isinstance(value, str) else value


def _cpu_list(value: object) -> object:
    """Read ``"0-3,6"``, as taskset and Linux write it, as (0, 1, 2, 3, 6); one number is a list, too."""
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, str):
        return value
    return numbers_of(value, "cpus", "CPUs", MAX_CPUS)


def numbers_of(value: str, name: str, what: str, below: int) -> tuple[int, ...]:
    """Read ``"0-3,6"`` as (0, 1, 2, 3, 6). Raises ConfigError, with the name of the setting and what it has."""
    numbers: set[int] = set()
    for part in value.strip("[]").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < below):
            raise ConfigError(
                f"{name} is {value!r}: {part!r} is neither a number nor a range; give {what} as 0-3 or 0,2,4-7, "
                f"below {below}"
            )
        numbers.update(range(int(first), int(last) + 1))
    return tuple(sorted(numbers))


def _words(value: object) -> object:
    """Split ``"/snapshots,s3://bucket/runs"``, as a flag or a variable of the environment says it, or a JSON list."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        return value.split(",")
    try:
        return json.loads(value)
    except ValueError as exc:
        raise ConfigError(f"{value!r} begins like a JSON list and is none: {exc}") from exc


def _part(value: str) -> str:
    number, _, of = value.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"part is {value!r}; it must be one of so many, as 2/3")
    return value


def _file_of_token(value: str) -> str:
    if value.startswith(TOKEN_PREFIX):
        raise ConfigError(f"this is a token, not its file; {_TOKEN_REMEDY}")
    return value


def _snapshot_root(value: str) -> str:
    if not value.startswith("/") and "://" not in value:
        raise ConfigError(f"{value!r} is no root of snapshots; give an absolute folder, as /snapshots, or a URL")
    return value


ListenAddress = Annotated[str, AfterValidator(_listen_address)]
TargetAddress = Annotated[str, AfterValidator(_target_address)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Ports = Annotated[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], BeforeValidator(_text_list)]
Cpus = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_CPUS)], ...], Field(min_length=1), BeforeValidator(_cpu_list)]
TextList = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_words)]
SnapshotRootList = Annotated[tuple[Annotated[str, AfterValidator(_snapshot_root)], ...], BeforeValidator(_words)]
Modules = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")], ...], BeforeValidator(_text_list)
]
MessageBytes = Annotated[int, Field(ge=2 * MIB, le=(1 << 31) - 1)]


def error_text(error: ErrorDetails) -> str:
    """One pydantic complaint in our words: what was given and why it cannot be."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return "unknown key"
    return f"{error['input']!r} is wrong: {error['msg'][:1].lower()}{error['msg'][1:]}"


class Section(BaseModel):
    """Base of all sections: frozen, keyword-only, no unknown keys, and errors are :class:`ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise ConfigError("; ".join(map(self._complaint, exc.errors()))) from exc

    @classmethod
    def _complaint(cls, error: ErrorDetails) -> str:
        place = ".".join(map(str, error["loc"]))
        if error["type"] == "extra_forbidden":
            return f"unknown key {place!r}; {suggestion(str(error['loc'][-1]), cls.model_fields)}"
        return f"{place}: {error_text(error)}" if place else error_text(error)


class RoleConfig(Section):
    """What every role is told."""

    listen: ListenAddress = "127.0.0.1:0"
    """Address to serve on; port 0 picks a free one."""
    insecure: bool = False
    """Serve on a non-loopback address without encryption or authentication."""
    reflection: bool = False
    """Tell whoever asks which services and messages there are (gRPC reflection), as grpcurl does."""
    max_message_bytes: MessageBytes = MAX_MESSAGE_BYTES
    """Largest message accepted, in bytes."""
    metrics: ListenAddress | None = None
    """Address to tell Prometheus on what the process counts; port 0 picks a free one. None: it is told nowhere."""

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        for key in ("listen", "metrics", "grpc"):
            if (address := getattr(self, key, None)) is not None:
                require_private(key, address, self.insecure)
        return self


def require_private(key: str, address: str, insecure: bool) -> None:
    """Raises ConfigError if strangers could reach ``address``, the setting ``key``, which was not wished."""
    if not (insecure or is_loopback(address) or identity(address)[0]):
        raise ConfigError(
            f"{key} {address!r} can be reached from other machines, and traffic would be neither encrypted "
            "nor authenticated; set security.folder to a folder that 'geartrain certs init' fills, listen on "
            "127.0.0.1, or accept the risk on a private network with --insecure (insecure: true)"
        )


class SchedulerConfig(RoleConfig):
    """The scheduler: membership, placement, schemas."""

    listen: ListenAddress = "127.0.0.1:7000"
    """Address to serve on; port 0 picks a free one."""
    num_shards: int = Field(default=1, ge=1, le=MAX_SHARDS)
    """Shards of the cluster, 1 … 4096; fixed for its life."""
    lease_seconds: Seconds = 10.0
    """A shard that has sent no heartbeat for this long counts as lost."""
    stream_lease_seconds: Seconds = 60.0
    """A worker that has committed nothing for this long loses its data streams to others."""
    data: str | None = Field(default=None, min_length=1)
    """Folder of its own for its state, so that a restarted scheduler goes on where it was; None: in memory."""


class ServerConfig(RoleConfig):
    """A server: a process that holds one or more shards."""

    listen: ListenAddress = "127.0.0.1:0"
    """Address to serve on; port 0 picks a free one. Further shards of the process pick free ports on the same host."""
    scheduler: TargetAddress = "127.0.0.1:7000"
    """Where the scheduler listens."""
    advertise: TargetAddress | None = None
    """Address that clients shall use, if it is not the one bound (containers, NAT)."""
    shard: int | None = Field(default=None, ge=0, lt=MAX_SHARDS)
    """Shard to hold (the first of them, if several); None lets the scheduler choose."""
    shards: int = Field(default=1, ge=1, le=MAX_SHARDS)
    """Shards held by this process."""
    wait: bool = False
    """Wait, as long as it takes, for a shard that another process holds, or held until a moment ago."""
    ports: Ports | None = None
    """Port of each shard of the process, in order, in place of that of ``listen``; None: as ``listen`` says."""
    data_port: int = Field(default=0, ge=0, le=65535)
    """Port for bulk connections (TCP) of the host's first shard; each further one takes the next. 0: any free ones."""
    heartbeat_seconds: Seconds = 1.0
    """Interval between heartbeats to the scheduler."""
    leave_timeout_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """How long a server that is told to end waits for the snapshots of running jobs; 0: it does not."""
    sync_timeout_seconds: Seconds = 60.0
    """How long a synchronous push waits for the other ranks of its group."""
    snapshot_roots: SnapshotRootList | None = None
    """Where snapshots may be, as /snapshots,s3://bucket/runs; None: anywhere for its own user, off loopback nowhere."""
    rule_modules: Modules | None = None
    """Modules to import for their rules by which rows go (``@gt.expiry_rule``), as my_package.rules. None: none."""
    memory_bytes: int | None = Field(default=None, ge=MIB)
    """Most bytes of rows, slots and indexes; writes beyond are refused. None: a share of its container or machine."""
    cpus: Cpus | None = None
    """CPUs that all threads of the process keep to, as 0-3,6, those that work on rows each to its shard's share of
    them: as many as shards are one thread a core. None: those that the system gives it."""
    memory_node: int | None = Field(default=None, ge=0, lt=64)
    """NUMA node of whose memory rows are made while it has some; None: of the CPU that makes them."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Most threads that work on one large request to a shard. None: CPUs of the process / its shards, at most 4."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advertise is not None and self.shards > 1:
            raise ConfigError(
                f"advertise {self.advertise!r} names one address, but the process holds {self.shards} shards"
            )
        if self.ports is not None and len(self.ports) != self.shards:
            raise ConfigError(f"ports names {len(self.ports)} ports, but the process holds {self.shards} shards")
        return self


class GraphConfig(RoleConfig):
    """The graph service: builds and keeps the neighbours of the classes of the cluster's class tables."""

    listen: ListenAddress = "127.0.0.1:7100"
    """Address to serve on; port 0 picks a free one. Clients are told it as client.graph."""
    scheduler: TargetAddress = "127.0.0.1:7000"
    """Where the scheduler of the cluster listens whose rows are read."""
    data: str | None = Field(default=None, min_length=1)
    """Folder of its own for graphs and unfinished builds; None: in memory, and a build that is killed begins anew."""
    memory_bytes: int = Field(default=8 << 30, ge=1 << 16)
    """For rows and candidates while a graph is built; with less than all rows need, they are read more than once."""
    snapshot_roots: SnapshotRootList | None = None
    """Where snapshots may be, as /snapshots,s3://bucket/runs; None: anywhere for its own user, off loopback nowhere."""


class SlowGearRoleConfig(RoleConfig):
    """A slow gear: serves the dense features of one dense part, and trains it."""

    scheduler: TargetAddress = "127.0.0.1:7000"
    """Where the scheduler of the cluster listens that holds the dense table."""
    advertise: TargetAddress | None = None
    """Address that fast gears shall use, if it is not the one bound (containers, NAT)."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the dense part and of its dense table."""
    module: str | None = Field(default=None, min_length=1)
    """What builds it: 'mypkg.image:build', a function -> nn.Module."""
    samples: str | None = Field(default=None, min_length=1)
    """Samples by id: 'mypkg.image:samples' (a function), 'lmdb:FOLDER', 'redis://HOST:PORT/0', 'folder:FOLDER'."""
    decode: str | None = Field(default=None, min_length=1)
    """What makes a tensor of a sample's bytes: 'mypkg.image:decode'; needed unless samples are a function."""
    dim: int | None = Field(default=None, ge=1)
    """Width of a dense feature."""
    store: str = "memory"
    """For features, and for gradients that wait: memory (ends with the process), lmdb:FOLDER (of one slow gear),
    redis://HOST:PORT/0 (?password_file=FILE; shared)."""
    store_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Most bytes of features in the store (a Redis server bounds itself), and of records of gradients: with more, what
    waits is applied."""
    device: str = "cpu"
    """Where the module runs."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Mixed precision of the module."""
    train_mode: Literal["backward", "always", "never"] = "backward"
    """When the module is in train(): in backward passes, also when features are computed, or never."""
    optimizer: str = "sgd:0.01"
    """Of the dense table: 'NAME:RATE', such as 'adam:0.001'; docs/explanation/optimizers.md has the names."""
    expire_seconds: float = Field(default=20.0, ge=0)
    """Older features are computed again."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Features more dense updates behind are computed again; None: any will do."""
    gradients_per_id: int = Field(default=16, ge=1, json_schema_extra={"flag": "-m"})
    """Gradients of an id that make one backward pass."""
    ids_per_update: int = Field(default=1, ge=1)
    """Ids with so many gradients that make a dense update worth while; about a batch's."""
    reduction: Literal["mean", "sum"] = "mean"
    """Of those gradients; the mean divides an SGD learning rate by their number."""
    flush_seconds: float | None = Field(default=None, ge=0)
    """Longest wait of gradients for others of their id; None: no bound."""
    stale: Literal["apply", "scale", "drop"] = "apply"
    """Gradients of old features are taken as they are, times 1 / (1 + lag), or dropped beyond max_gradient_lag."""
    max_gradient_lag: int | None = Field(default=None, ge=0)
    """In dense updates; with stale: drop."""
    max_batch: int = Field(default=256, ge=1)
    """Most ids of one device batch."""
    max_wait_millis: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How long a batch of features waits for more."""
    refresh_seconds: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """How often the updates of other slow gears are looked for; with fast gears in sync mode: 0."""


class ServeConfig(RoleConfig):
    """A service that answers questions to trained models over HTTP and gRPC."""

    listen: ListenAddress = "127.0.0.1:8000"
    """Address for HTTP; port 0 picks a free one."""
    models: TextList = Field(default=(), json_schema_extra={"argument": "DIR|NAME=DIR"})
    """Folders of exported models, or of versions of one (DIR/000120), each with a name if there are several."""
    follow: str | None = Field(default=None, min_length=1)
    """A training still running, as NAME=RUN or RUN: a folder or URL of its snapshots, or its scheduler's HOST:PORT or
    HOST:PORT/JOB. The newest snapshot is served, and the next one as it comes; of a folder of exported models, too."""
    versions: str | None = Field(default=None, min_length=1)
    """Folder for the versions of what is followed, which are served at once after a restart. None: a temporary one."""
    keep: int = Field(default=3, ge=2)
    """Versions of what is followed that stay for a rollback."""
    recall: float = Field(default=1.0, gt=0, le=1)
    """Of a classifier that is followed: the share of questions whose best class must be found; below 1 many classes get
    an index."""
    part: Annotated[str, AfterValidator(_part)] | None = None
    """Of the classes of what is followed: 2/3 serves the second of three equal parts. None: all of them."""
    parts: Annotated[tuple[TargetAddress, ...], BeforeValidator(_words)] = ()
    """HOST:PORT of the services of all parts, which search the classes for this one; it has no class rows itself."""
    backbone: str | None = Field(default=None, min_length=1)
    """Code of your own that makes the network of what is followed (package.module:function); only then is it run."""
    preprocessing: str | None = Field(default=None, min_length=1)
    """Code of your own that makes tensors of what models are asked with (package.module:function); only then is it run.
    """
    grpc: ListenAddress | None = None
    """Address for gRPC (KServe's v2 protocol), too; None: HTTP alone."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that share the port; the files of models are in memory once."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Of one batch. None: the CPUs of the process, divided among the workers."""
    canary: str | None = Field(default=None, min_length=1)
    """Folder of a version that gets a part of the questions to the first model."""
    share: float = Field(default=0.1, ge=0, le=1)
    """That part."""
    max_batch: int = Field(default=64, ge=1, le=65_536)
    """Most items that are answered together."""
    max_wait_millis: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Longest wait of a question for others while some are being answered; to an idle service none waits."""
    max_queued: int = Field(default=1024, ge=1)
    """Most items that wait; beyond them questions are refused (503)."""
    max_requests: int = Field(default=512, ge=1)
    """Most requests at once; beyond them they are refused (503)."""
    max_items: int = Field(default=256, ge=1)
    """Most items of one request (413)."""
    max_body_bytes: int = Field(default=16 * MIB, ge=1024)
    """Most bytes of the body of a request (413)."""
    body_seconds: Seconds = 10.0
    """Longest time for the headers, and for the body, of a request to arrive (408)."""
    requests_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most of one client (a token, else an address) for longer than a second (429). None: no limit."""
    origins: TextList = ()
    """Other web pages that may ask, as https://example.com (CORS). None by default."""


class ClientConfig(Section):
    """A client: any process that pulls and pushes."""

    graph: TargetAddress | None = None
    """Where the graph service of the cluster listens; None: there is none, and who needs a graph builds it."""

    connect_timeout_seconds: Seconds = 10.0
    """How long the first connection to a role may take."""
    refused_timeout_seconds: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How much of that a scheduler is tried that refuses connections: none runs there, or it is just being started."""
    attempt_timeout_seconds: Seconds = 30.0
    """Bounds one call to one shard; a call that fails is tried again."""
    recovery_timeout_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """How long to wait for a shard that does not answer, from the first failure on; 0: do not wait."""
    hosted_timeout_seconds: Seconds = 300.0
    """Bounds one call to a hosted model of a shard, which computes over all of the shard's rows."""
    snapshot_timeout_seconds: Seconds = 3600.0
    """Bounds the writing, and the reading back, of one shard's part of a snapshot."""
    part_bytes: int = Field(default=16 * MIB, ge=64 << 10)
    """Larger messages, to hosted models and slow gears, travel in parts of this many bytes."""
    shared_memory: bool = True
    """Rows of shards on this machine lie in memory that both share; else they travel by TCP, as to other machines."""
    max_in_flight_writes: int = Field(default=64, ge=1, le=1024)
    """Writes per stream that may be unacknowledged at once."""
    max_message_bytes: MessageBytes = MAX_MESSAGE_BYTES
    """Largest message accepted, in bytes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        largest = self.max_message_bytes - HEADER_BYTES
        if self.part_bytes > largest:
            raise ConfigError(
                f"part_bytes is {self.part_bytes}; with max_message_bytes {self.max_message_bytes} "
                f"it is at most {largest}"
            )
        return self


class SecurityConfig(Section):
    """Who processes are to each other."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder of certificates (geartrain certs init) for all calls. None: a private one on loopback; "none": without."""
    token: Annotated[str, AfterValidator(_file_of_token)] | None = Field(default=None, min_length=1)
    """File of this program's token (geartrain certs token), where clients need one."""
    audit: str | None = Field(default=None, min_length=1)
    """File to which roles add a line for each refused call, and each that changes tables. None: their logs."""


class ClusterConfig(Section):
    """A whole cluster: what one YAML file holds."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """The scheduler."""
    server: ServerConfig = ServerConfig()
    """Every server; each is told its own shard and listen address by whoever starts it."""
    graph: GraphConfig = GraphConfig()
    """The graph service, if there is one."""
    slowgear: SlowGearRoleConfig = SlowGearRoleConfig()
    """The slow gears of one dense part, if there are any."""
    serve: ServeConfig = ServeConfig()
    """The service of trained models, if there is one."""
    client: ClientConfig = ClientConfig()
    """Every client."""
    security: SecurityConfig = SecurityConfig()
    """All of them."""
    mode: Literal["development", "production"] = "development"
    """In production, failpoints (GEARTRAIN_FAILPOINTS) are refused."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scheduler.lease_seconds < 2 * self.server.heartbeat_seconds:
            raise ConfigError(
                f"scheduler.lease_seconds is {self.scheduler.lease_seconds}; with server.heartbeat_seconds "
                f"{self.server.heartbeat_seconds} it is at least {2 * self.server.heartbeat_seconds}, so that one late "
                "heartbeat loses no shard"
            )
        return self

    @property
    def num_servers(self) -> int:
        """Server processes that hold all shards.

        Raises:
            ConfigError: the shards cannot be divided evenly among processes of ``server.shards`` shards.
        """
        servers, rest = divmod(self.scheduler.num_shards, self.server.shards)
        if rest:
            raise ConfigError(
                f"scheduler.num_shards is {self.scheduler.num_shards}; it must be a multiple of server.shards "
                f"({self.server.shards})"
            )
        return servers
