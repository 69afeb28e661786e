#!/usr/bin/env bash
# Sets everything up in .venv, then shows the main job: a matrix product by the configuration that
# the model finds. Without an NVIDIA GPU the same tuner is answered from recorded H100 timings.
set -euo pipefail
cd "$(dirname "$0")/.."
bash .ci/setup
exec .venv/bin/python benchmarks/quickstart.py "$@"
