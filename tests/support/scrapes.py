"""What a role tells Prometheus, read as Prometheus reads it."""

from __future__ import annotations

import http.client
import socket
import ssl

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer: ``scrape.value("geartrain_table_rows", table="t", shard=0)``."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name + "_total" * (family.type == "counter"): family.type for family in families}
        """By the name of each family."""
        self.samples = [sample for family in families for sample in family.samples]
        assert all("cluster" in sample.labels for sample in self.samples)

    def values(self, name: str, **labels: object) -> list[float]:
        """Of all samples with these labels, and others."""
        wanted = {key: str(value) for key, value in labels.items()}.items()
        return [sample.value for sample in self.samples if sample.name == name and wanted <= sample.labels.items()]

    def value(self, name: str, **labels: object) -> float:
        """Of the only one."""
        (value,) = self.values(name, **labels)
        return value


def scrape(address: str, context: ssl.SSLContext | None = None, name: str = "") -> Scrape:
    """Ask ``"host:port"`` once; with a context for TLS, the host that is called ``name``."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.sock = socket.create_connection((host, int(port)), timeout=20)
    if context is not None:
        connection.sock = context.wrap_socket(connection.sock, server_hostname=name)
    try:
        connection.request("GET", "/metrics")
        return Scrape(connection.getresponse().read().decode())
    finally:
        connection.close()
