#!/usr/bin/env bash
# Damaged run directories for as long as you like: no answer but our own errors.
#
#   bash scripts/fuzz.sh [SECONDS]      default: one hour
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
setup_processes
end=$((SECONDS + ${1:-3600}))
seed=1
while [ "$SECONDS" -lt "$end" ]; do
    MSPROBE_FUZZ_SEED=$seed MSPROBE_FUZZ_CASES=${MSPROBE_FUZZ_CASES:-300} \
        "$MSPROBE_PYTHON" -m pytest -q -m trust tests/trust/test_untrusted_files.py || { echo "failed with seed $seed"; exit 1; }
    seed=$((seed + 1))
done
echo "no crash in $((seed - 1)) rounds"
