#!/usr/bin/env bash
#
# Which Megatron works with this kit: runs the tests against other releases; tools/host_table.py keeps what it prints.
#
#     bash scripts/test_matrix.sh                                releases of megatron-core from PyPI
#     bash scripts/test_matrix.sh 0.12.3 0.16.1                  only these
#     bash scripts/test_matrix.sh --quick 0.10.0                 fewer layouts
#     bash scripts/test_matrix.sh --checkouts ~/Megatron-LM …    pretrain_gpt.py of these checkouts (tests/jobs/hosts)
#
# Each release is installed into a folder of its own, .matrix/VERSION, and put in front of the environment's
# megatron-core; torch is shared. Releases from 0.17 on ask for Python 3.12: they run in .matrix/newer_python, which is
# made if a Python 3.12 or 3.13 is found. Logs: .matrix/NAME.log. Exit code 1 if any release fails.

set -euo pipefail
unset CDPATH

case ${1:-} in
    -h | --help)
        sed -n '3,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh"
setup_env dev
setup_processes
matrix=$root/.matrix
python=$MSPROBE_PYTHON
mkdir -p -- "$matrix"
failed=0

# Packages that some releases import and the kit itself does not need.
extras() {
    local folder=$matrix/extras
    if [ ! -d "$folder" ]; then
        "$MSPROBE_PYTHON" -m pip install -q --no-deps --target "$folder" einops 'setuptools<80'
    fi
    printf '%s' "$folder"
}

# The interpreter for a release; 0.17 and later do not install on Python 3.11.
python_for() {
    local minor=${1#0.}
    if [ "${minor%%.*}" -ge 17 ]; then
        (cd -- "$root" && "$MSPROBE_PYTHON" -m tests.support.newer_python)
    else
        printf '%s' "$MSPROBE_PYTHON"
    fi
}

result() { tail -n 1 "$1" | sed -E 's/^=+ | =+$//g; s/ in [0-9.]+s.*//'; }

# One line of the table: name, then the commands' results. $1 name, $2 PYTHONPATH, the rest goes to pytest.
tests_of() {
    local name=$1 path=$2 log=$matrix/$1.log state=works
    shift 2
    if ! (cd -- "$root" && PYTHONPATH=$path "$python" -m pytest -q -p no:cacheprovider "$@") >"$log" 2>&1; then
        state=fails
        failed=1
    fi
    printf '| %s | %s | %s |\n' "$name" "$state" "$(result "$log")"
}

patches_of() {
    (cd / && PYTHONPATH=$1 "$python" -m msprobe_megatron.cli patches --json 2>/dev/null) |
        "$MSPROBE_PYTHON" -c 'import json, sys
lines = [json.loads(line) for line in sys.stdin if line.startswith("[")][-1]
core = [line for line in lines if "megatron.training" not in line["target"]]
absent = ", ".join(line["id"] for line in core if line["state"] != "bound")
bound = sum(line["state"] == "bound" for line in core)
print(f"{bound} of {len(core)} bound" + (f"; absent: {absent}" if absent else ""))'
}

if [ "${1:-}" = --checkouts ]; then
    shift
    printf '| checkout | state | tests/jobs/hosts |\n|---|---|---|\n'
    for checkout in "$@"; do
        checkout=$(cd -- "$checkout" && pwd -P)
        MEGATRON_LM_PATH=$checkout tests_of "$(basename -- "$checkout")" "$(extras)" tests/jobs/hosts/test_megatron_lm.py
    done
    exit "$failed"
fi

choice=(tests/jobs/distributed/test_bit_exact.py tests/jobs/distributed/test_rows.py tests/jobs/distributed/test_merge.py)
if [ "${1:-}" = --quick ]; then
    shift
    choice=(tests/jobs/distributed/test_rows.py -k 'single or tp2_pp2 or recompute')
fi
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.10.0 0.12.3 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2)
printf '| megatron-core | state | tests of all layouts |\n|---|---|---|\n'
for version in "${versions[@]}"; do
    folder=$matrix/$version
    python=$(python_for "$version")
    if [ ! -d "$folder/megatron" ]; then
        "$python" -m pip install -q --no-deps --target "$folder" "megatron-core==$version"
    fi
    path=$folder:$(extras)
    tests_of "$version" "$path" "${choice[@]}"
    printf '<!-- %s: patches %s -->\n' "$version" "$(patches_of "$path")"
done
exit "$failed"
