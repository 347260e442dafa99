#!/usr/bin/env bash
# The long forms of the trust tests: 200 kills at random moments, 2,000 recorded steps. About 20 minutes on 2 cores.
#
#   bash scripts/soak.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
setup_processes
export MSPROBE_KILLS=${MSPROBE_KILLS:-200} MSPROBE_SOAK_STEPS=${MSPROBE_SOAK_STEPS:-2000}
exec "$MSPROBE_PYTHON" -m pytest -s -m trust tests/trust "$@"
