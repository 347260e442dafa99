#!/usr/bin/env bash
#
# Everything that is checked before a change goes in: lint, format, types, tests. .ci/run calls this and nothing else.
#
#     bash scripts/test.sh                  all of it
#     bash scripts/test.sh -k layers -x     arguments go to pytest; paths are relative to the checkout
#
# All four steps run even if one fails; the exit code is 1 if any did, and the last lines say which.

set -euo pipefail
unset CDPATH

case ${1:-} in
    -h | --help)
        sed -n '3,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh"
setup_env dev
setup_processes
cd -- "$root"

failed=()
step() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then
        printf '== %s: passed (%d s)\n' "$name" $((SECONDS - started))
    else
        printf '== %s: FAILED (%d s)\n' "$name" $((SECONDS - started))
        failed+=("$name")
    fi
}

step 'ruff check' "$MSPROBE_PYTHON" -m ruff check .
step 'ruff format' "$MSPROBE_PYTHON" -m ruff format --check .
step 'mypy' bash scripts/types.sh
step 'pytest' "$MSPROBE_PYTHON" -m pytest "$@"

printf '\n'
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed:'
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf 'ruff check, ruff format, mypy and pytest passed in %d s\n' "$SECONDS"
