# shellcheck shell=bash
# What the launch scripts share; sourced by them, from the repository or from wherever the folder was copied.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Prints the comment at the head of the script that was called.
usage() {
  sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//p;s/^#$//p}' "$0"
}

die() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit 2
}

# Sets PYTHON, unless it is set: to that of the environment `make` builds, or a python3 that has geartrain.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON is '$PYTHON', which is no program"
    return
  fi
  for candidate in "$here/../.venv/bin/python" python3; do
    if "$candidate" -c 'import geartrain' 2>/dev/null; then
      PYTHON=$candidate
      return
    fi
  done
  die "no Python here has geartrain; run 'make install' in the repository, or name one that has it: PYTHON=/path/to/python"
}

# flag NAME VALUE: adds --NAME=VALUE to the array `flags` unless VALUE is empty.
flag() {
  [ -z "$2" ] || flags+=("--$1=$2")
}

insecure_flag() {
  case "${INSECURE:-}" in
    "" | 0) ;;
    1) flags+=(--insecure) ;;
    *) die "INSECURE is '$INSECURE'; it must be 1, or 0" ;;
  esac
}

# need_address NAME VALUE WHAT: dies unless VALUE is host:port.
need_address() {
  [ -n "$2" ] || die "$1 is not set; give $3 as $1=HOST:PORT"
  local port=${2##*:}
  case "$2" in ?*:?*) ;; *) port= ;; esac
  case "$port" in "" | *[!0-9]*) die "$1 is '$2'; it must be HOST:PORT" ;; esac
}
