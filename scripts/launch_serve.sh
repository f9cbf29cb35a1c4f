#!/usr/bin/env bash
# Starts a service of trained models, over HTTP, on this host.
#
#   MODELS=/mnt/models/glyphs LISTEN=10.0.0.5:8000 scripts/launch_serve.sh [FLAG...]
#
#   MODELS      folder of a model that 'geartrain export' wrote, or of its versions; several as "glyphs=DIR faces=DIR"
#               (needed)
#   LISTEN      HOST:PORT to serve on
#   WORKERS     processes that share it
#   INSECURE    1: allow a LISTEN that other machines reach without certificates (0)
#   GEARTRAIN_SECURITY__FOLDER
#               this machine's folder of certificates ('geartrain certs issue')
#   PYTHON      Python to run (.venv/bin/python of the repository, else python3)
#
# Flags are those of 'geartrain serve --help'. SIGTERM ends it, once what is under way is answered.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

flags=()
[ -n "${MODELS:-}" ] || die "MODELS is not set; give the folder of a model as MODELS=DIR"
[ -z "${LISTEN:-}" ] || need_address LISTEN "$LISTEN" "the address to serve on"
read -r -a models <<<"$MODELS"
flag listen "${LISTEN:-}"
flag workers "${WORKERS:-}"
insecure_flag
find_python
exec "$PYTHON" -P -m geartrain serve "${models[@]}" "${flags[@]}" "$@"
