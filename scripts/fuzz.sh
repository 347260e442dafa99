#!/usr/bin/env bash
# Hostile inputs for as long as you like: damaged run directories in every command, checkpoints, msprobe dumps,
# overlays of recipes, control files and probe files, every round with new ones. No answer but our own errors, nothing
# written elsewhere.
#
#   bash scripts/fuzz.sh [SECONDS]      default: one hour
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
setup_processes
end=$((SECONDS + ${1:-3600}))
cases=${MSPROBE_FUZZ_CASES:-100}
seed=${MSPROBE_FUZZ_SEED:-1}
rounds=0
inputs=0
while [ "$SECONDS" -lt "$end" ]; do
    log=$(mktemp)
    # 250 examples a test stand in tests/unit/config/test_fuzz.py.
    if ! MSPROBE_FUZZ_SEED=$seed MSPROBE_FUZZ_CASES=$cases "$MSPROBE_PYTHON" -m pytest -q -m "trust or not trust" \
        --hypothesis-seed="$seed" -s tests/trust/test_untrusted_*.py tests/unit/config/test_fuzz.py \
        >"$log" 2>&1; then
        cat "$log"
        echo "failed with seed $seed after $inputs inputs"
        exit 1
    fi
    inputs=$((inputs + $(grep -ao 'inputs tried: [0-9]*' "$log" | awk '{n += $3} END {print n + 0}')))
    rm -f "$log"
    seed=$((seed + 1))
    rounds=$((rounds + 1))
    echo "$rounds rounds, $inputs inputs, $SECONDS s: no crash"
done
