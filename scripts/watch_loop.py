"""A loop of one's own beside a watched cluster: rows kept on the device, SSP, and samples of a topic.

``python -m scripts.watch_loop SCHEDULER`` prints one line of JSON with the address of its counters, and goes on.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import confluent_kafka as kafka

import geartrain as gt

QUICK: dict[str, Any] = {"log_level": 0}


def main(scheduler: str) -> None:
    """Train without end."""
    producer = kafka.Producer({"test.mock.num.brokers": 1, **QUICK})
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    brokers = f"{broker.host}:{broker.port}"
    with gt.connect(scheduler) as cluster, gt.ops.serve_metrics("127.0.0.1:0") as port:
        mode = gt.SSP(2, worker="own")
        fields = gt.Embedding(cluster, "own", 4, optimizer=gt.SGD(0.1), mode=mode, device_cache_bytes=1 << 16)
        rows = gt.RowOptimizer(fields)
        producer.produce("clicks", value=b'{"user": 1}')
        producer.flush(20)
        samples = gt.KafkaSamples("clicks", brokers, schema={"user": "int64"}, batch_size=1, settings=QUICK)
        with samples.shared(cluster, "own", worker="own") as batches:
            print(json.dumps({"metrics": port.address}), flush=True)
            for batch in batches:
                producer.produce("clicks", value=b'{"user": 1}')
                producer.flush(20)
                fields(batch["user"]).sum().backward()
                rows.step()
                rows.zero_grad()
                batches.commit(batch)
                time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
