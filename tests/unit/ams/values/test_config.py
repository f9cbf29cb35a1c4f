"""Sections refuse what a role could not honour, and files, environment and flags override one another in that order."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from geartrain.ams.values.config import (
    ClientConfig,
    ClusterConfig,
    SchedulerConfig,
    Section,
    ServerConfig,
    is_loopback,
    split_address,
)
from geartrain.ams.values.errors import ConfigError
from geartrain.launch import configuration

NO_ENVIRONMENT: dict[str, str] = {}


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("shard-0.internal:0", ("shard-0.internal", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_is_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "7000",
        ":7000",
        "localhost",
        "localhost:",
        "localhost:65536",
        "localhost:-1",
        "a:7e3",
        "::1:7",
        "a b/c:1",
        " a:1",
        "unix:1",
        "dns:1",
        "unix:/run/x.sock",
        "dns:///a:1",
    ],
)
def test_what_is_no_address_is_refused_and_quoted(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(listen=address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"])
def test_loopback_addresses_are_known(address: str) -> None:
    assert is_loopback(address)
    SchedulerConfig(listen=address)


@pytest.mark.parametrize("section", [SchedulerConfig, ServerConfig])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.4:1", "localhost.example.com:1"])
def test_a_role_reachable_from_outside_needs_insecure(section: type[Section], address: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        section(listen=address)
    section(listen=address, insecure=True)


@pytest.mark.parametrize("model", [SchedulerConfig, ServerConfig, ClientConfig])
def test_every_field_has_a_docstring_and_is_frozen(model: type[Section]) -> None:
    config = model()
    for name, field in model.model_fields.items():
        assert field.description, name
        with pytest.raises(ValidationError, match="frozen"):
            setattr(config, name, getattr(config, name))


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (SchedulerConfig, {"num_shards": 0}),
        (SchedulerConfig, {"num_shards": 4097}),
        (SchedulerConfig, {"lease_seconds": 0}),
        (SchedulerConfig, {"lease_seconds": float("inf")}),
        (SchedulerConfig, {"max_message_bytes": 1 << 31}),
        (ServerConfig, {"scheduler": "127.0.0.1:0"}),
        (ServerConfig, {"advertise": "shard:0"}),
        (ServerConfig, {"advertise": "shard:1", "shards": 2}),
        (ServerConfig, {"shard": -1}),
        (ServerConfig, {"heartbeat_seconds": -1.0}),
        (ClientConfig, {"recovery_timeout_seconds": -1}),
        (ClientConfig, {"attempt_timeout_seconds": float("nan")}),
        (ClientConfig, {"part_bytes": 64 << 20}),
        (ClientConfig, {"max_in_flight_writes": 0}),
        (ClusterConfig, {"scheduler": SchedulerConfig(lease_seconds=1.5)}),
    ],
)
def test_a_value_outside_its_range_is_a_config_error(model: type[Section], values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        model(**values)


def test_an_unknown_key_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'lisen'; did you mean 'listen'\?"):
        ServerConfig(lisen="127.0.0.1:0")  # type: ignore[call-arg]


def test_servers_are_as_many_as_hold_all_shards() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(num_shards=6), server=ServerConfig(shards=2))
    assert config.num_servers == 3


def test_shards_that_cannot_be_divided_among_servers_are_refused() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(num_shards=3), server=ServerConfig(shards=2))
    with pytest.raises(ConfigError, match=r"multiple of server\.shards"):
        _ = config.num_servers


def test_the_environment_overrides_the_file_and_flags_override_both(tmp_path: Path) -> None:
    path = written(tmp_path, "scheduler:\n  num_shards: 2\n  lease_seconds: 20\n  listen: 127.0.0.1:7100\n")
    environ = {"GEARTRAIN_SCHEDULER__NUM_SHARDS": "3", "GEARTRAIN_SCHEDULER__LEASE_SECONDS": "30"}
    config = configuration.load(path, configuration.flags("scheduler", num_shards=4, lease_seconds=None), environ)
    assert config.scheduler == SchedulerConfig(num_shards=4, lease_seconds=30.0, listen="127.0.0.1:7100")


def test_the_mode_is_overridden_like_any_setting(tmp_path: Path) -> None:
    path = written(tmp_path, "mode: production\n")
    assert configuration.load(path, (), {}).mode == "production"
    assert configuration.load(path, (), {"GEARTRAIN_MODE": "development"}).mode == "development"
    given = configuration.flags(configuration.WHOLE, mode="production")
    assert configuration.load(path, given, {"GEARTRAIN_MODE": "development"}).mode == "production"


def test_an_empty_file_and_an_empty_variable_mean_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "# nothing yet\nserver:\n")
    assert configuration.load(path, (), {"GEARTRAIN_SERVER__ADVERTISE": ""}) == ClusterConfig()


def test_other_variables_of_the_same_prefix_are_left_alone() -> None:
    assert configuration.load(None, (), {"GEARTRAIN_CACHE": "/x", "HOME": "/y"}) == ClusterConfig()


CONFIG = ClusterConfig(
    scheduler=SchedulerConfig(listen="0.0.0.0:7000", insecure=True, num_shards=4),
    server=ServerConfig(shard=1, scheduler="scheduler:7000", heartbeat_seconds=0.25),
    client=ClientConfig(recovery_timeout_seconds=0),
    mode="production",
)


def test_a_configuration_survives_yaml(tmp_path: Path) -> None:
    assert configuration.load(written(tmp_path, configuration.to_yaml(CONFIG)), (), NO_ENVIRONMENT) == CONFIG


def test_a_configuration_survives_the_environment_of_a_child() -> None:
    environ = configuration.to_environment(CONFIG, {"HOME": "/y", "GEARTRAIN_SERVER__SHARDS": "9"})
    assert environ["HOME"] == "/y"
    assert configuration.load(None, (), environ) == CONFIG


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "scheduler:\n  listen: 127.0.0.1:1\n  num_shard: 2\n",
            r":3: unknown key 'num_shard' .*did you mean 'num_shards'",
        ),
        ("schedular:\n  listen: 127.0.0.1:1\n", r":1: unknown section 'schedular'; did you mean 'scheduler'"),
        ("server:\n  shards: two\n", r":2: server.shards: 'two' is wrong"),
        ("server:\n  shards: 1\n  listen: nowhere\n", r":3: server.listen: address 'nowhere'"),
        ("server:\n  listen: 0.0.0.0:7000\n", r"--insecure"),
        ("server:\n  shards: 1\n  shards: 2\n", r":3: 'shards' is given twice"),
        ("mode: prod\n", r":1: mode: 'prod' is wrong: it must be 'development' or 'production'"),
        ("moed: production\n", r":1: unknown section 'moed'; did you mean 'mode'"),
        ("server: 3\n", r":1: section 'server' must be a mapping"),
        ("- server\n", r":1: the file must be a mapping"),
        ("server: [\n", r":2: not valid YAML"),
        ("server:\n  listen: !!python/object/apply:os.getpid []\n", r":2: not valid YAML: could not determine"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=complaint):
        configuration.load(path, (), NO_ENVIRONMENT)


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"GEARTRAIN_SERVER__LISEN": "127.0.0.1:1"}, "GEARTRAIN_SERVER__LISEN: .*did you mean 'listen'"),
        ({"GEARTRAIN_SERVR__LISTEN": "127.0.0.1:1"}, "GEARTRAIN_SERVR__LISTEN: .*did you mean 'server'"),
        (
            {"GEARTRAIN_SERVER_LISTEN": "x:1"},
            "GEARTRAIN_SERVER_LISTEN would be ignored; write GEARTRAIN_SERVER__LISTEN,",
        ),
        ({"GEARTRAIN_MODE": "prod"}, "environment variable GEARTRAIN_MODE: mode: 'prod' is wrong"),
        ({"GEARTRAIN_SERVER__SHARDS": "-1"}, "GEARTRAIN_SERVER__SHARDS: server.shards: '-1' is wrong"),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_its_variable(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configuration.load(None, (), environ)


def test_an_empty_variable_is_unset_however_it_is_spelt() -> None:
    empty = {"GEARTRAIN_SERVER_LISTEN": "", "GEARTRAIN_SERVER__LISTEN": ""}
    assert configuration.load(None, (), empty) == configuration.load(None, (), NO_ENVIRONMENT)


def test_a_mistake_in_a_flag_is_named_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"flag --num-shards: scheduler.num_shards: 0 is wrong"):
        configuration.load(None, configuration.flags("scheduler", num_shards=0), NO_ENVIRONMENT)


def test_a_store_that_is_none_is_refused_with_its_name_and_without_a_password() -> None:
    says = r"flag --store: .*names no store; give memory, lmdb:FOLDER or"
    for url, shown in (("lmbd:store", "'lmbd:store'"), ("rdis://u:secret@redis/0", "'rdis://redis/0'")):
        with pytest.raises(ConfigError, match=says) as refused:
            configuration.load(None, configuration.flags("slowgear", store=url), NO_ENVIRONMENT)
        assert shown in str(refused.value) and "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        configuration.load(tmp_path / "none.yaml", (), NO_ENVIRONMENT)


def test_ports_are_one_for_each_shard_of_the_process() -> None:
    assert ServerConfig(shards=2, ports="7001,7002").ports == (7001, 7002)  # type: ignore[arg-type]
    assert ServerConfig(ports=7001).ports == (7001,)  # type: ignore[arg-type]
    config = ClusterConfig(server=ServerConfig(shards=2, ports=(7001, 7002)), scheduler=SchedulerConfig(num_shards=2))
    assert configuration.load(environ=configuration.to_environment(config, {})) == config
    with pytest.raises(ConfigError, match="ports names 1 ports, but the process holds 2 shards"):
        ServerConfig(shards=2, ports=(7001,))
    with pytest.raises(ConfigError, match="ports"):
        ServerConfig(ports="seven")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data_port"):
        ServerConfig(data_port=65_536)


def test_cpus_are_given_as_linux_writes_them() -> None:
    assert ServerConfig(cpus="0-3,6").cpus == (0, 1, 2, 3, 6)  # type: ignore[arg-type]
    assert ServerConfig(cpus=3).cpus == (3,)  # type: ignore[arg-type]
    config = ClusterConfig(server=ServerConfig(cpus=(5, 1)))
    assert configuration.load(environ=configuration.to_environment(config, {})).server.cpus == (1, 5)
    for wrong in ("3-1", "a", "0-", "", "9999", "-1"):
        with pytest.raises(ConfigError, match="give CPUs as 0-3"):
            ServerConfig(cpus=wrong)  # type: ignore[arg-type]


def test_a_flag_of_up_is_named_as_it_was_given() -> None:
    given = configuration.flags("scheduler", prefix="scheduler-", listen="foo")
    with pytest.raises(ConfigError, match=r"flag --scheduler-listen: scheduler.listen: address 'foo'"):
        configuration.load(None, given, NO_ENVIRONMENT)


def test_roots_of_snapshots_come_as_a_list_or_as_text_and_reach_child_processes(tmp_path: Path) -> None:
    roots = ("/snapshots", "s3://bucket/runs")
    file = written(tmp_path, "server:\n  snapshot_roots: [/snapshots, 's3://bucket/runs']\n")
    whole = configuration.load(file, environ=NO_ENVIRONMENT)
    assert whole.server.snapshot_roots == roots and whole.graph.snapshot_roots is None
    child = configuration.to_environment(whole, NO_ENVIRONMENT)
    assert configuration.load(environ=child) == whole
    given = configuration.flags("graph", snapshot_roots="/snapshots,s3://bucket/runs")
    assert configuration.load(None, given, NO_ENVIRONMENT).graph.snapshot_roots == roots
    assert configuration.load(written(tmp_path, configuration.to_yaml(whole)), environ=NO_ENVIRONMENT) == whole


@pytest.mark.parametrize("roots", ["", "snapshots", "/a,", "[/a", ["/a", "b"]])
def test_a_root_of_snapshots_that_is_neither_a_whole_path_nor_a_url_is_refused(roots: object) -> None:
    with pytest.raises(ConfigError, match="snapshot_roots"):
        ServerConfig(snapshot_roots=roots)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["a\x1b[2J", "a\u202eb", "a b", "a\x00", "-a", "[::1\x1b]", "ä"])
def test_a_host_is_a_printable_name(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_address(f"{host}:7000")
    assert str(caught.value).isprintable()


def test_a_password_in_a_setting_is_not_shown_and_reaches_child_processes() -> None:
    url = "redis://gear:secret@redis:6379/0?password=secret"
    config = configuration.load(None, configuration.flags("slowgear", store=url, samples=url), NO_ENVIRONMENT)
    for text in (configuration.to_yaml(config), str(configuration.to_plain(config))):
        assert "secret" not in text and "redis://redis:6379/0" in text
    assert configuration.load(None, environ=configuration.to_environment(config, NO_ENVIRONMENT)) == config
