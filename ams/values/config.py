"""Settings of each role as frozen typed models: one section a role, one field a setting, a docstring each.

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
from geartrain.ams.values.text import shown_url

MIB = 1 << 20
MAX_MESSAGE_BYTES = 64 * MIB
MAX_SHARDS = 4096
"""Most shards: the number of buckets."""
MAX_CPUS = 8192
"""Most CPUs that Linux can be built for."""
HEADER_BYTES = MIB
"""Most bytes of a message beside its rows."""


_GRPC_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "google-c2p")
"""Schemes that gRPC reads before a colon: ``unix:7000`` is a socket in a folder, not a host."""


TOKEN_PREFIX = "gt1."
"""Prefix of the tokens of jobs."""
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
    if isinstance(address, str) and TOKEN_PREFIX in address:  # the error must not show it
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
    if not _HOST.fullmatch(host):  # addresses from other processes are printed: no escape sequences
        raise ConfigError(f"address {address!r} has host {host!r}; it must be a name of letters, digits, .-_ or an IP")
    if host in _GRPC_SCHEMES:
        raise ConfigError(f"address {address!r} has host {host!r}, which gRPC takes for a kind of address; use another")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ConfigError(f"address {address!r} has port {port!r}; a port is a number from 0 to 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``"host:port"``, with brackets around an IPv6 host."""
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
"""Roles with a certificate of their own; processes that serve no calls use the client's."""

TOKEN_VARIABLE = "GEARTRAIN_SECURITY__TOKEN"

_identity: tuple[str, str] | None = None
_token: str | None = None


def identify(folder: str | None, role: str = CLIENT, token: str | None = None) -> None:
    """Set the certificate that this process shows from its next connection on: that of ``role`` in ``folder``.

    None: as the environment says, which is also the default. A process has one identity for all peers. ``token`` is the
    file of its token; None: as the environment says.
    """
    global _identity, _token
    _identity = None if folder is None else (folder, role)
    _token = token


def identify_as_role(address: str) -> None:
    """Use the certificate of a role in this process's folder, if the folder has none of a client.

    For calls that a role may make, too: whether others serve, and the members of the cluster.
    """
    folder, role = identity(address)
    if folder is not None and not (Path(folder) / f"{role}.pem").exists():
        identify(folder, next((found for found in CERTIFIED_ROLES if (Path(folder) / f"{found}.pem").exists()), role))


def token_path() -> str | None:
    """Return the file of this process's token; None: it has none. Raises ConfigError."""
    return SecurityConfig(token=_token or os.environ.get(TOKEN_VARIABLE) or None).token


def require_no_token(arguments: Iterable[str]) -> None:
    """Raise ConfigError if an argument of a command holds a token, where all users of the machine see it."""
    if any(TOKEN_PREFIX in argument and _TOKEN.search(argument) for argument in arguments):
        raise ConfigError(
            f"there is a token among the arguments; have another made, revoke this one, and {_TOKEN_REMEDY}"
        )


def is_identified() -> bool:
    """Return whether certificates, or that there are none, were set for this process."""
    return bool(_identity or os.environ.get(FOLDER_VARIABLE))


def identity(address: str) -> tuple[str | None, str]:
    """Return (folder of certificates, None without; role) of this process for either end of ``address``.

    On loopback a process without a folder setting uses the private one of its user, if it exists.
    """
    folder, role = _identity or (os.environ.get(FOLDER_VARIABLE) or None, CLIENT)
    if folder is None and is_loopback(address) and private_folder().is_dir():
        return str(private_folder()), CLIENT
    return (None if folder is None or folder == NO_FOLDER else str(Path(folder).expanduser())), role


def private_folder() -> Path:
    """Return the folder of this user's certificates on this machine: ``client.pem`` there is good for every role."""
    return platformdirs.user_data_path("geartrain") / "security"


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """Return a hint that names the most similar ``known`` key, or lists them all."""
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
    """Split ``"7001,7002"`` or ``"my_package.rules,other.rules"``, of a flag or an environment variable; or one
    number."""
    if isinstance(value, int):
        return (value,)
    return value.strip("[]").split(",") if isinstance(value, str) else value


def _cpu_list(value: object) -> object:
    """Return ``"0-3,6"``, the form of taskset and Linux, as (0, 1, 2, 3, 6); one number is a list, too."""
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, str):
        return value
    return numbers_of(value, "cpus", "CPUs", MAX_CPUS)


def numbers_of(value: str, name: str, what: str, below: int) -> tuple[int, ...]:
    """Return ``"0-3,6"`` as (0, 1, 2, 3, 6). Raises ConfigError with the setting's name and what it lists."""
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
    """Split ``"/snapshots,s3://bucket/runs"``, the form of a flag or an environment variable, or read a JSON list."""
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


_STORES = ("redis://", "rediss://", "unix://")


def feature_store(url: str) -> str:
    """Return ``url`` if it names a kind of store of features. Raises ConfigError."""
    if url != "memory" and not url.startswith(_STORES) and not (url.startswith("lmdb:") and url != "lmdb:"):
        raise ConfigError(f"{shown_url(url)!r} names no store; give memory, lmdb:FOLDER or redis://HOST:PORT/DB")
    return url


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
    """Return the text of a pydantic error: the value and why it is not allowed."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return "unknown key"
    why = error["msg"].replace("Input should", "it must")
    return f"{error['input']!r} is wrong: {why[:1].lower()}{why[1:]}"


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
    """Settings of every role."""

    listen: ListenAddress = "127.0.0.1:0"
    """Address to serve on; port 0 picks a free one."""
    insecure: bool = False
    """Serve on a non-loopback address without encryption or authentication."""
    reflection: bool = False
    """Serve gRPC reflection: the services and messages there are, as grpcurl lists them."""
    max_message_bytes: MessageBytes = MAX_MESSAGE_BYTES
    """Largest message accepted, in bytes."""
    metrics: ListenAddress | None = None
    """Address of the Prometheus metrics; port 0 picks a free one. None: no metrics are served."""

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        for key in ("listen", "metrics", "grpc"):
            if (address := getattr(self, key, None)) is not None:
                require_private(key, address, self.insecure)
        return self


def require_private(key: str, address: str, insecure: bool) -> None:
    """Raise ConfigError if other machines could reach ``address``, the setting ``key``, without ``insecure`` or TLS."""
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
    """Folder of its own for its state, which a restarted scheduler loads; None: in memory."""


class ServerConfig(RoleConfig):
    """A server: a process that holds one or more shards."""

    listen: ListenAddress = "127.0.0.1:0"
    """Address to serve on; port 0 picks a free one. Further shards of the process pick free ports on the same host."""
    scheduler: TargetAddress = "127.0.0.1:7000"
    """Address of the scheduler."""
    advertise: TargetAddress | None = None
    """Address for clients, if it is not the one bound (containers, NAT)."""
    shard: int | None = Field(default=None, ge=0, lt=MAX_SHARDS)
    """Shard to hold (the first of them, if several); None lets the scheduler choose."""
    shards: int = Field(default=1, ge=1, le=MAX_SHARDS)
    """Shards held by this process."""
    wait: bool = False
    """Wait, without limit, for a shard that another process holds or held until recently."""
    ports: Ports | None = None
    """Port of each shard of the process, in order, in place of that of ``listen``; None: by ``listen``."""
    data_port: int = Field(default=0, ge=0, le=65535)
    """Port for bulk connections (TCP) of the host's first shard; each further one takes the next. 0: any free ones."""
    heartbeat_seconds: Seconds = 1.0
    """Interval between heartbeats to the scheduler."""
    leave_timeout_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Longest wait of a server that is shutting down for the snapshots of running jobs; 0: no wait."""
    sync_timeout_seconds: Seconds = 60.0
    """Longest wait of a synchronous push for the other ranks of its group."""
    snapshot_roots: SnapshotRootList | None = None
    """Roots allowed for snapshots, as /snapshots,s3://bucket/runs; None: any for its own user, off loopback none."""
    rule_modules: Modules | None = None
    """Modules to import for their expiry rules (``@gt.expiry_rule``), as my_package.rules. None: none."""
    memory_bytes: int | None = Field(default=None, ge=MIB)
    """Most bytes of rows, slots and indexes; writes beyond are refused. None: a share of the container or machine."""
    cpus: Cpus | None = None
    """CPUs of all threads of the process, as 0-3,6. Row threads keep to their shard's share; with one CPU a shard each
    has a core of its own. None: all CPUs of the process."""
    memory_node: int | None = Field(default=None, ge=0, lt=64)
    """NUMA node that rows are allocated on while it has memory; None: that of the allocating CPU."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Most threads of one large request to a shard. None: CPUs of the process / its shards, at most 4."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advertise is not None and self.shards > 1:
            raise ConfigError(
                f"advertise {self.advertise!r} names one address, but the process holds {self.shards} shards; leave it "
                "out, or start a server for each shard"
            )
        if self.ports is not None and len(self.ports) != self.shards:
            raise ConfigError(
                f"ports names {len(self.ports)} ports, but the process holds {self.shards} shards; name one for each"
            )
        return self


class GraphConfig(RoleConfig):
    """The graph service: builds and keeps the neighbours of the classes of the cluster's class tables."""

    listen: ListenAddress = "127.0.0.1:7100"
    """Address to serve on; port 0 picks a free one. Clients have it as client.graph."""
    scheduler: TargetAddress = "127.0.0.1:7000"
    """Address of the scheduler of the cluster whose rows are read."""
    data: str | None = Field(default=None, min_length=1)
    """Folder of its own for graphs and unfinished builds; None: in memory, and a killed build starts again."""
    memory_bytes: int = Field(default=8 << 30, ge=1 << 16)
    """Most bytes for rows and candidates of a build; if all rows need more, they are read more than once."""
    snapshot_roots: SnapshotRootList | None = None
    """Roots allowed for snapshots, as /snapshots,s3://bucket/runs; None: any for its own user, off loopback none."""


class SlowGearRoleConfig(RoleConfig):
    """A slow gear: serves the dense features of one dense part, and trains it."""

    scheduler: TargetAddress = "127.0.0.1:7000"
    """Address of the scheduler of the cluster that holds the dense table."""
    advertise: TargetAddress | None = None
    """Address for fast gears, if it is not the one bound (containers, NAT)."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the dense part and of its dense table."""
    module: str | None = Field(default=None, min_length=1)
    """Function that builds the module: 'mypkg.image:build', -> nn.Module."""
    samples: str | None = Field(default=None, min_length=1)
    """Samples by id: 'mypkg.image:samples' (a function), 'lmdb:FOLDER', 'redis://HOST:PORT/0', 'folder:FOLDER'."""
    decode: str | None = Field(default=None, min_length=1)
    """Function from a sample's bytes to a tensor: 'mypkg.image:decode'; needed unless samples are a function."""
    dim: int | None = Field(default=None, ge=1)
    """Width of a dense feature."""
    store: Annotated[str, AfterValidator(feature_store)] = "memory"
    """For features, and for gradients that wait: memory (ends with the process), lmdb:FOLDER (of one slow gear),
    redis://HOST:PORT/0 (?password_file=FILE; shared)."""
    store_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Most bytes of features in the store (a Redis server bounds itself), and of records of gradients: with more, what
    waits is applied."""
    device: str = "cpu"
    """Device of the module."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Mixed precision of the module."""
    train_mode: Literal["backward", "always", "never"] = "backward"
    """When the module is in train mode: in backward passes, also when features are computed, or never."""
    optimizer: str = "sgd:0.01"
    """Optimizer of the dense table: 'NAME:RATE', such as 'adam:0.001'; docs/explanation/optimizers.md has the names."""
    expire_seconds: float = Field(default=20.0, ge=0)
    """Age at which features are computed again, in seconds."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Dense updates behind at which features are computed again; None: any number is allowed."""
    gradients_per_id: int = Field(default=16, ge=1, json_schema_extra={"flag": "-m"})
    """Gradients of an id in one backward pass."""
    ids_per_update: int = Field(default=1, ge=1)
    """Ids with that many gradients that trigger a dense update; about a batch's."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of those gradients; the mean divides an SGD learning rate by their number."""
    flush_seconds: float | None = Field(default=None, ge=0)
    """Longest wait of gradients for others of their id; None: no bound."""
    stale: Literal["apply", "scale", "drop"] = "apply"
    """Gradients of old features are applied unchanged, times 1 / (1 + lag), or dropped beyond max_gradient_lag."""
    max_gradient_lag: int | None = Field(default=None, ge=0)
    """Largest lag in dense updates; with stale: drop."""
    max_batch: int = Field(default=256, ge=1)
    """Most ids of one device batch."""
    max_wait_millis: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Longest wait of a batch of features for more."""
    refresh_seconds: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Interval of polling for updates of other slow gears; with fast gears in sync mode: 0."""


class ServeConfig(RoleConfig):
    """A service that serves trained models over HTTP and gRPC."""

    listen: ListenAddress = "127.0.0.1:8000"
    """Address for HTTP; port 0 picks a free one."""
    models: TextList = Field(default=(), json_schema_extra={"argument": "DIR|NAME=DIR"})
    """Folders of exported models, or of versions of one (DIR/000120), each with a name if there are several."""
    follow: str | None = Field(default=None, min_length=1)
    """Running training to follow, as NAME=RUN or RUN: a folder or URL of its snapshots, or its scheduler's HOST:PORT or
    HOST:PORT/JOB. Each new snapshot is served; of a folder of exported models, each new model."""
    versions: str | None = Field(default=None, min_length=1)
    """Folder for the versions of the followed model, served at once after a restart. None: a temporary one."""
    keep: int = Field(default=3, ge=2)
    """Number of followed versions that are kept for a rollback."""
    recall: float = Field(default=1.0, gt=0, le=1)
    """Least share of requests whose best class a followed classifier must find; below 1 many classes get an index."""
    part: Annotated[str, AfterValidator(_part)] | None = None
    """Part of the followed model's classes: 2/3 serves the second of three equal parts. None: all of them."""
    parts: Annotated[tuple[TargetAddress, ...], BeforeValidator(_words)] = ()
    """HOST:PORT of the services of all parts, which search the classes for this one; it has no class rows itself."""
    backbone: str | None = Field(default=None, min_length=1)
    """Function of yours that builds the followed model's network (package.module:function); no code runs without it."""
    preprocessing: str | None = Field(default=None, min_length=1)
    """Function of yours from inputs of requests to tensors (package.module:function); no code runs without it."""
    grpc: ListenAddress | None = None
    """Address for gRPC (KServe's v2 protocol); None: HTTP alone."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that share the port; they share one copy of the model files in memory."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Threads of one batch. None: the CPUs of the process, divided among the workers."""
    canary: str | None = Field(default=None, min_length=1)
    """Folder of the canary: a version that gets a share of the requests to the first model."""
    share: float = Field(default=0.1, ge=0, le=1)
    """Share of requests that go to the canary."""
    max_batch: int = Field(default=64, ge=1, le=65_536)
    """Most items of a batch."""
    max_wait_millis: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Longest wait of a request for others while a batch is computed; an idle service answers at once."""
    max_queued: int = Field(default=1024, ge=1)
    """Most queued items; requests beyond are refused (503)."""
    max_requests: int = Field(default=512, ge=1)
    """Most requests at once; requests beyond are refused (503)."""
    max_items: int = Field(default=256, ge=1)
    """Most items of one request (413)."""
    max_body_bytes: int = Field(default=16 * MIB, ge=1024)
    """Most bytes of the body of a request (413)."""
    body_seconds: Seconds = 10.0
    """Longest time for the headers, and for the body, of a request to arrive (408)."""
    requests_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most requests a second of one client (a token, else an address), over a second or more (429). None: no limit."""
    origins: TextList = ()
    """Origins of other web pages that may send requests, as https://example.com (CORS). None by default."""


class ClientConfig(Section):
    """A client: any process that pulls and pushes."""

    graph: TargetAddress | None = None
    """Address of the cluster's graph service; None: there is none, and clients build the graphs they need."""

    connect_timeout_seconds: Seconds = 10.0
    """Longest time for the first connection to a role."""
    refused_timeout_seconds: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Part of that for a scheduler that refuses connections: it does not run, or is just starting."""
    attempt_timeout_seconds: Seconds = 30.0
    """Deadline of one call to one shard; a failed call is retried."""
    recovery_timeout_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Longest wait for an unresponsive shard, from the first failure on; 0: do not wait."""
    hosted_timeout_seconds: Seconds = 300.0
    """Deadline of one call to a hosted model of a shard, which computes over all of the shard's rows."""
    snapshot_timeout_seconds: Seconds = 3600.0
    """Deadline of writing, and of reading, one shard's part of a snapshot."""
    part_bytes: int = Field(default=16 * MIB, ge=64 << 10)
    """Bytes of the parts in which larger messages to hosted models and slow gears travel."""
    shared_memory: bool = True
    """Exchange rows with shards on this machine in shared memory; else by TCP, as with other machines."""
    max_in_flight_writes: int = Field(default=64, ge=1, le=1024)
    """Most unacknowledged writes of a stream."""
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
    """Identity of processes towards each other."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder of certificates (geartrain certs init) for all calls. None: a private one on loopback; "none": without."""
    token: Annotated[str, AfterValidator(_file_of_token)] | None = Field(default=None, min_length=1)
    """File of this program's token (geartrain certs token), where clients need one."""
    audit: str | None = Field(default=None, min_length=1)
    """File to which roles append a line for each refused call, and each that changes tables. None: their logs."""


class ClusterConfig(Section):
    """A whole cluster: the content of one YAML file."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """The scheduler."""
    server: ServerConfig = ServerConfig()
    """Every server; its launcher gives each its own shard and listen address."""
    graph: GraphConfig = GraphConfig()
    """The graph service, if there is one."""
    slowgear: SlowGearRoleConfig = SlowGearRoleConfig()
    """The slow gears of one dense part, if there are any."""
    serve: ServeConfig = ServeConfig()
    """The service of trained models, if there is one."""
    client: ClientConfig = ClientConfig()
    """Every client."""
    security: SecurityConfig = SecurityConfig()
    """All processes."""
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
        """Number of server processes that hold all shards.

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
