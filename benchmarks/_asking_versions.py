"""Load generator that classifies a picture at a rate, and checks that each answer is of one version.

    python _asking_versions.py HOST:PORT FILE SECONDS RATE

Questions leave at their times, and the time of an answer counts from when its question was due. Rate 0: one after the
other on each connection. Prints {"times": [...], "wrong": ..., "versions": [...]}.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from pathlib import Path

CONNECTIONS = 8


def main(address: str, file: str, seconds: float, rate: float) -> None:
    """Send questions, and print the answers' summary."""
    picture, begin = Path(file).read_bytes(), time.perf_counter() + 0.2
    times: list[float] = []
    wrong: list[str] = []
    versions: set[int] = set()
    numbers, lock = iter(range(10**9)), threading.Lock()

    def ask_on() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while True:
            with lock:
                number = next(numbers)
            due = begin + number / rate if rate else time.perf_counter()
            if due > begin + seconds:
                return
            time.sleep(max(0.0, due - time.perf_counter()))
            connection.request("POST", "/v1/classify?k=2", picture, {"Content-Type": "image/png"})
            response = connection.getresponse()
            said = json.loads(response.read())
            times.append(time.perf_counter() - due)
            if response.status != 200 or said["answers"][0][0]["id"] or said["answers"][0][0]["score"] < 0.999:
                wrong.append(str(said)[:300])
            else:
                versions.add(said["version"])

    askers = [threading.Thread(target=ask_on) for _ in range(CONNECTIONS)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    print(json.dumps({"times": times, "wrong": wrong[:3], "num_wrong": len(wrong), "versions": sorted(versions)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
