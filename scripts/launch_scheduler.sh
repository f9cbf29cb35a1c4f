#!/usr/bin/env bash
# Starts the scheduler of a cluster on this host. One for each cluster.
#
#   NUM_SHARDS=4 LISTEN=10.0.0.1:7000 scripts/launch_scheduler.sh [FLAG...]
#
#   NUM_SHARDS  shards of the cluster (needed)
#   LISTEN      HOST:PORT to serve on (127.0.0.1:7000)
#   DATA        folder for its state, so that it comes back knowing what it knew (memory)
#   INSECURE    1: allow a LISTEN that other machines reach without certificates (0)
#   GEARTRAIN_SECURITY__FOLDER
#               this machine's folder of certificates ('geartrain certs issue')
#   PYTHON      Python to run (.venv/bin/python of the repository, else python3)
#
# Flags are those of 'geartrain scheduler --help', and settings also come as GEARTRAIN_SCHEDULER__KEY. One line of JSON
# on stdout says when it serves. SIGTERM ends it.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

flags=()
shards=${NUM_SHARDS:-${GEARTRAIN_SCHEDULER__NUM_SHARDS:-}}
case "$shards" in
  "") die "NUM_SHARDS is not set; say how many shards the cluster has, as NUM_SHARDS=2" ;;
  0 | *[!0-9]*) die "NUM_SHARDS is '$shards'; it must be a number from 1 on" ;;
esac
[ -z "${LISTEN:-}" ] || need_address LISTEN "$LISTEN" "the address to serve on"
flag num-shards "$shards"
flag listen "${LISTEN:-}"
flag data "${DATA:-}"
insecure_flag
find_python
exec "$PYTHON" -P -m geartrain scheduler "${flags[@]}" "$@"
