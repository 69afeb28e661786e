#!/usr/bin/env bash
# Sets everything up in .venv, then runs all checks and tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash .ci/setup test
exec bash .ci/check "$@"
