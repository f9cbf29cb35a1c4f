#!/usr/bin/env bash
# Starts a slow gear, which serves the dense features of a module by id and trains the module, on this host.
#
#   SCHEDULER=10.0.0.1:7000 NAME=image MODULE=mypkg.image:build SAMPLES=folder:/data/images DIM=64 \
#     LISTEN=10.0.0.4:7200 scripts/launch_slowgear.sh [FLAG...]
#
#   SCHEDULER   HOST:PORT of the scheduler (needed)
#   NAME        name of the dense part (needed)
#   MODULE      function that builds the torch module, as mypkg.image:build (needed)
#   SAMPLES     samples by id: a function as mypkg.image:samples, folder:PATH, lmdb:PATH or redis://HOST:PORT/0 (needed)
#   DIM         width of a dense feature (needed)
#   LISTEN      HOST:PORT to serve on
#   ADVERTISE   HOST:PORT under which fast gears reach it, if it is another
#   STORE       where features and waiting gradients are kept: memory, lmdb:PATH or redis://HOST:PORT/0 (memory)
#   DEVICE      where the module runs (cpu)
#   INSECURE    1: allow a LISTEN that other machines reach without certificates (0)
#   GEARTRAIN_SECURITY__FOLDER
#               this machine's folder of certificates ('geartrain certs issue')
#   PYTHON      Python to run (.venv/bin/python of the repository, else python3)
#
# Flags are those of 'geartrain slowgear --help'. SIGTERM ends it, when it has applied what waits.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

flags=()
need_address SCHEDULER "${SCHEDULER:-}" "the address that the scheduler printed"
[ -z "${LISTEN:-}" ] || need_address LISTEN "$LISTEN" "the address to serve on"
[ -z "${ADVERTISE:-}" ] || need_address ADVERTISE "$ADVERTISE" "the address that fast gears use"
for needed in NAME MODULE SAMPLES DIM; do
  [ -n "${!needed:-}" ] || die "$needed is not set; see $(basename "$0") --help"
done
flag scheduler "$SCHEDULER"
flag name "$NAME"
flag module "$MODULE"
flag samples "$SAMPLES"
flag dim "$DIM"
flag listen "${LISTEN:-}"
flag advertise "${ADVERTISE:-}"
flag store "${STORE:-}"
flag device "${DEVICE:-}"
insecure_flag
find_python
exec "$PYTHON" -P -m geartrain slowgear "${flags[@]}" "$@"
