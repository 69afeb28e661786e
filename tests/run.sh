#!/usr/bin/env bash
# Sets everything up in .venv, then runs style, types and tests; `--fast` leaves the slow tests out.
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash .ci/setup test
exec bash .ci/check "$@"
