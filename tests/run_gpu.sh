#!/usr/bin/env bash
# All tests that need an NVIDIA GPU, with the Python of .venv if there is one, else with $PYTHON
# (default: python3), into which costmodel and its extra `test` are installed. Arguments go to pytest.
#
# They are compiling most of the time, so many run at once (JOBS, default: 14 or the number of cores).
# Those that time, or that fill the memory, come afterwards, one by one.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
cores=$(nproc)
jobs=${JOBS:-$((cores < 14 ? cores : 14))}
run() { "$python" -m pytest tests/gpu -W default "$@"; }

run -m 'not alone' -n "$jobs" --dist worksteal "$@"
together=$?
run -m alone "$@"
alone=$?
exit $((together ? together : alone))
