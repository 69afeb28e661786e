#!/usr/bin/env bash
# All tests that need an NVIDIA GPU, with the python of $PYTHON (default: python3), into which
# costmodel and its extra `test` are installed; arguments go to pytest.
#
# They are compiling most of the time, so that many run at once (JOBS, default: 14 or the number of
# cores). Those that time, or that fill the memory, come afterwards, one by one.
set -uo pipefail
cd "$(dirname "$0")/.."
cores=$(nproc)
jobs=${JOBS:-$((cores < 14 ? cores : 14))}
run() { "${PYTHON:-python3}" -m pytest tests/gpu -W default "$@"; }

run -m 'not alone' -n "$jobs" --dist worksteal "$@"
together=$?
run -m alone "$@"
alone=$?
exit $((together ? together : alone))
