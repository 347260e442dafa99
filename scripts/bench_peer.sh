#!/usr/bin/env bash
# Runs every bench beside the published msprobe and writes BENCHMARKS.md.
#
#   bash scripts/bench_peer.sh [DIRECTORY] [WHAT...]
#
# DIRECTORY (default: bench_out) keeps the tables, pictures and the two environments of the peer, which see the torch of
# this one; WHAT is a choice of benches. About an hour on 2 cores; leave the machine alone meanwhile.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
setup_processes
python=$MSPROBE_PYTHON

out=${1:-bench_out}
shift || true
benches=("$@")
[ ${#benches[@]} -gt 0 ] || benches=(dump layers volume perturb monitor scaling compare)
mkdir -p "$out"
export OMP_NUM_THREADS=1

peer() { # version -> interpreter that has it
    local folder="$out/peer_$1"
    if [ ! -x "$folder/bin/msprobe" ]; then
        "$python" -m venv "$folder" >&2
        # torch comes from here: a second one would be minutes and gigabytes, and another version.
        "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
            > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/host.pth"
        "$folder/bin/python" -m pip install -q "mindstudio-probe==$1" >&2
    fi
    echo "$folder/bin/python"
}

for bench in "${benches[@]}"; do
    options=(--out "$out" --profile)
    case $bench in
        dump | monitor) options+=(--peer-python "$(peer 26.2.0)") ;;
        perturb) options+=(--peer-python "$(peer 8.3.3)") ;;
    esac
    echo "== bench $bench" >&2
    "$python" -m msprobe_megatron.cli bench "$bench" "${options[@]}"
done
"$python" -m msprobe_megatron.bench.document "$out" > BENCHMARKS.md
echo "BENCHMARKS.md written" >&2
