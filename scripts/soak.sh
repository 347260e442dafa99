#!/usr/bin/env bash
# The long forms of the trust tests: 200 kills at random moments, 2,000 steps with everything on, a writer that is really
# 100 times too slow. One to two hours on 2 cores; MEGATRON_LM_PATH adds Megatron's own unit tests in three states.
#
#   bash scripts/soak.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
setup_processes
export MSPROBE_KILLS=${MSPROBE_KILLS:-200} MSPROBE_SOAK_STEPS=${MSPROBE_SOAK_STEPS:-2000}
"$MSPROBE_PYTHON" -m pytest -s -m trust tests/jobs/trust "$@"
exec "$MSPROBE_PYTHON" -m pytest -s tests/jobs/hosts/test_unit_tests.py
