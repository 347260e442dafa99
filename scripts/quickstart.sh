#!/usr/bin/env bash
#
# From nothing to a recorded training job, on CPU.
#
#     bash scripts/quickstart.sh [OUT]
#
# Sets up a Python environment (the active one, else .venv in the checkout), then trains a tiny GPT twice with the
# probe on: on 4 processes (2-way tensor parallel x 2-way pipeline parallel) and on 1, same weights, same data.
# Prints what was recorded and how to look at it. Each call writes a new directory OUT/run_001, run_002, ...;
# OUT is ./quickstart_out unless given.

set -euo pipefail
unset CDPATH

usage() { sed -n '3,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
refuse() {
    printf 'quickstart.sh: %s\n' "$1" >&2
    printf 'usage: bash scripts/quickstart.sh [OUT]      (--help says more)\n' >&2
    exit 2
}

case ${1:-} in
    -h | --help) usage && exit 0 ;;
    --) shift ;;
    -*) refuse "unknown option: $1" ;;
esac
[ $# -le 1 ] || refuse "one argument at most, the output directory; got $#: $*"
[ $# -eq 0 ] || [ -n "$1" ] || refuse "the output directory is an empty string"
out=${1:-./quickstart_out}
# Refused here and not by mkdir after minutes of installing.
if [ -e "$out" ] && [ ! -d "$out" ]; then refuse "$out is there and is not a directory"; fi
mkdir -p -- "$out" || refuse "$out cannot be made"
out=$(cd -- "$out" && pwd -P)
[ -w "$out" ] || refuse "$out cannot be written to"

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh"
user_venv=${VIRTUAL_ENV:-}
setup_env
setup_processes
started=$SECONDS

# mkdir and not a test for existence: two quickstarts at once get two directories.
number=1
while run=$out/run_$(printf '%03d' "$number") && ! mkdir -m 700 -- "$run" 2>/dev/null; do
    [ -e "$run" ] || refuse "$run cannot be made"
    number=$((number + 1))
done

# Without dropout, whose random numbers differ with the layout: so both runs compute the same thing.
model=(--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
    --swiglu --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --log-interval 1)

# train NAME PROCESSES FLAGS...: what it prints is also kept in $run/NAME.log
train() {
    local name=$1 processes=$2 status=0
    shift 2
    printf '\n== %s: training on %d process%s ==\n' "$name" "$processes" "$([ "$processes" = 1 ] || echo es)"
    # --standalone takes a free port; --local-addr saves looking up a host name that may not resolve.
    "$MSPROBE_PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" \
        -m msprobe_megatron.demo.pretrain_gpt "${model[@]}" "$@" \
        --msprobe-device cpu --msprobe-config "$root/scripts/quickstart_probe.yaml" --msprobe-output "$run/$name" \
        2>&1 | tee -- "$run/$name.log" || status=$?
    if [ "$status" -ne 0 ]; then
        printf '\nquickstart.sh: the training run %s failed (exit %d); its output: %s\n' "$name" "$status" "$run/$name.log" >&2
        exit 1
    fi
}

summarise() {
    printf '\n== %s: what was recorded ==\n' "$1"
    if ! msprobe-megatron summary "$run/$1"; then
        printf '\nquickstart.sh: the summary of %s was not clean\n' "$run/$1" >&2
        exit 1
    fi
}

train tp2pp2 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
train single 1
summarise tp2pp2
summarise single

printf '\n== are the two the same computation? ==\n'
if ! msprobe-megatron compare "$run/single" "$run/tp2pp2"; then
    printf '\nquickstart.sh: the two runs do not agree\n' >&2
    exit 1
fi
msprobe-megatron report "$run/tp2pp2" --against "$run/single" --out "$run/report.html"

printf '\n== where it is, and how to look at it (%d s after set-up) ==\n' $((SECONDS - started))
printf '  %s\n' "$run/tp2pp2    4 processes" "$run/single    1 process" \
    "  run.json                                  versions, arguments, coordinates of every rank, what was patched" \
    "  step_000000/rank_00000/records.parquet    one row a tensor; sites.json beside it says where in the code"
printf '\nAgain, for any run:\n\n'
if [ -z "$user_venv" ]; then printf '  source %q\n' "$VIRTUAL_ENV/bin/activate"; fi
printf '  msprobe-megatron summary %q\n' "$run/tp2pp2"
printf '  msprobe-megatron compare %q %q\n' "$run/single" "$run/tp2pp2"
printf '\nOr ask the rows yourself:\n\n'
query='import duckdb, sys; rows = duckdb.read_parquet(sys.argv[1] + "/step_*/rank_*/records.parquet"); '
query+='rows.aggregate("step, kind, count(*) as records, max(absmax) as absmax").order("step, kind").show()'
printf "  python -c '%s' %q\n" "$query" "$run/tp2pp2"
printf '\nThe page of the two runs (verdict, model, trends, ranks); open it in a browser:\n\n  %s\n' "$run/report.html"
