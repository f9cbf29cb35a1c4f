#!/usr/bin/env bash
# docker-compose.yml for real: builds the image, starts the cluster, waits until it is ready, trains on it, takes and
# restores a snapshot, ends it.
#   COMPOSE="docker compose" scripts/compose_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
read -r -a compose <<<"${COMPOSE:-docker compose}"
trap '"${compose[@]}" --profile worker --profile gear down -v' EXIT

"${compose[@]}" up -d
for _ in $(seq 60); do
  if "${compose[@]}" exec -T scheduler geartrain status --scheduler 127.0.0.1:7000; then ready=1 && break; fi
  sleep 1
done
[ "${ready:-}" ] || { echo "the cluster is not ready after a minute" >&2; exit 1; }
"${compose[@]}" --profile worker run --rm -T worker
if "${compose[@]}" --profile gear pull redis; then
  "${compose[@]}" --profile gear run --rm -T fast-gear
else
  echo "the image of the Redis service is not to be had here: slow and fast gears were not tried" >&2
fi
"${compose[@]}" exec -T scheduler geartrain snapshot create /snapshots --scheduler 127.0.0.1:7000
"${compose[@]}" exec -T scheduler geartrain snapshot restore /snapshots --replace --scheduler 127.0.0.1:7000
"${compose[@]}" exec -T scheduler geartrain status --scheduler 127.0.0.1:7000 --json
