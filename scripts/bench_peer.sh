#!/usr/bin/env bash
# Runs every bench beside the published msprobe and writes BENCHMARKS.md.
#
#   bash scripts/bench_peer.sh [--quick | --turns N] [--again] [DIRECTORY] [WHAT...]
#
# DIRECTORY (default: bench_out) keeps the tables, pictures and the two environments of the peer, which see the torch of
# this one. WHAT is a choice: dump layers volume perturb monitor counts device scaling compare, or a part such as dump:h64.
# About forty minutes on 2 cores; leave the machine alone meanwhile. Interrupted, the same command goes on where it was:
# what has its table in DIRECTORY is not measured a second time, unless --again is given.
# --turns N measures with N turns, --quick with one: to see that all works. Their document is DIRECTORY/BENCHMARKS.md.
# MSPROBE_PYTHON names an interpreter that has the kit, MSPROBE_PEER_26_2_0 and MSPROBE_PEER_8_3_3 some that have these
# versions of the peer; what is not named is installed.
set -euo pipefail
{ # read as a whole before anything is done: an edit of this file does not reach a run of an hour
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Part, and its seconds on two cores.
parts=(
    dump:h64 270 dump:h1024 650 layers 290 volume 100 perturb:h64 200 perturb:h512 330 perturb@all 80
    monitor:h64 190 monitor:h1024 450 monitor:tp2 120 counts 20 device 90 scaling 40 compare 120
)
usage() {
    sed -n '4,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
turns='' again='' words=()
while [ $# -gt 0 ]; do
    case $1 in
        --quick) turns=1 ;;
        --turns)
            [ $# -gt 1 ] || usage
            turns=$2
            shift
            ;;
        --again) again=yes ;;
        -*) usage ;;
        *) words+=("$1") ;;
    esac
    shift
done
case $turns in *[!0-9]* | 0) usage ;; esac
out=${words[0]:-bench_out}
wanted=("${words[@]:1}")
if [ "${#wanted[@]}" -eq 0 ]; then wanted=(dump layers volume perturb monitor counts device scaling compare); fi

chosen=() seconds=()
for word in "${wanted[@]}"; do
    before=${#chosen[@]}
    for ((i = 0; i < ${#parts[@]}; i += 2)); do
        if [ "$word" = "${parts[i]}" ] || [ "$word" = "${parts[i]%%[:@]*}" ]; then
            chosen+=("${parts[i]}")
            seconds+=("${parts[i + 1]}")
        fi
    done
    if [ "${#chosen[@]}" -eq "$before" ]; then
        echo "bench_peer.sh: nothing is called '$word'" >&2
        usage
    fi
done

mkdir -p -- "$out"
if [ "$(df -Pk -- "$out" | awk 'NR == 2 {print $4}')" -lt 4000000 ]; then
    echo "bench_peer.sh: $out has less than 4 GB left; name a directory on a larger disk" >&2
    exit 2
fi
source scripts/setup_env.sh
if [ -z "${MSPROBE_PYTHON:-}" ]; then setup_env; fi
setup_processes
python=$MSPROBE_PYTHON

declare -A peers=()
peer() { # version -> "found" is an interpreter that has it, or nothing
    local folder=$out/peer_$1 variable=MSPROBE_PEER_${1//./_}
    found=${peers[$1]-${!variable-}}
    if [ -z "$found" ] && [ -z "${peers[$1]+known}" ]; then
        if [ ! -e "$folder/ready" ]; then
            echo "== installing mindstudio-probe $1" >&2
            if "$python" -m venv --clear "$folder" >&2 &&
                # torch comes from here: a second one would be minutes and gigabytes, and another version.
                "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
                    >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/host.pth" &&
                "$folder/bin/python" -m pip install -q "mindstudio-probe==$1" >&2; then
                touch -- "$folder/ready"
            else
                echo "== mindstudio-probe $1 cannot be installed: its column is left out" >&2
            fi
        fi
        if [ -e "$folder/ready" ]; then found=$folder/bin/python; fi
    fi
    peers[$1]=$found
}

minutes_left() { # index of the part that comes next
    local left=0 i
    for ((i = $1; i < ${#chosen[@]}; i++)); do left=$((left + seconds[i])); done
    # At the pace of what was measured so far.
    if [ "$expected" -gt 0 ]; then left=$((left * took / expected)); fi
    echo $(((left + 59) / 60))
}

trap 'echo "bench_peer.sh: interrupted; what is measured is in $out, the same command goes on there" >&2; exit 130' INT TERM
failed=() took=0 expected=0
for ((i = 0; i < ${#chosen[@]}; i++)); do
    part=${chosen[i]}
    name=${part//[:@]/_}
    # A table of few turns does not stand in for a whole one.
    few=$(grep -c '"command": ".* --turns ' "$out/$name.json" 2>/dev/null || true)
    if [ -z "$again" ] && [ -s "$out/$name.json" ] && { [ -n "$turns" ] || [ "$few" = 0 ]; }; then
        echo "== $part: is in $out" >&2
        continue
    fi
    options=(--out "$out" --profile)
    case $part in
        *:*) options+=(--only "${part#*:}") ;;
        *@*) options+=(--model "${part#*@}") ;;
    esac
    case $part in
        dump* | device | monitor:h*) peer 26.2.0 ;;
        perturb:*) peer 8.3.3 ;;
        *) found='' ;;
    esac
    if [ -n "$found" ]; then options+=(--peer-python "$found"); fi
    if [ -n "$turns" ]; then options+=(--turns "$turns"); fi
    echo "== $part ($((i + 1)) of ${#chosen[@]}, about $(minutes_left "$i") minutes left)" >&2
    begun=$SECONDS
    if ! "$python" -m msprobe_megatron.cli bench "${part%%[:@]*}" "${options[@]}" >"$out/$name.log"; then
        failed+=("$part")
    fi
    took=$((took + SECONDS - begun)) expected=$((expected + seconds[i]))
    echo "== $part took $((SECONDS - begun)) s" >&2
done

document=BENCHMARKS.md
if [ -n "$turns" ]; then document=$out/BENCHMARKS.md; fi
for ((i = 0; i < ${#parts[@]}; i += 2)); do
    if [ ! -s "$out/${parts[i]//[:@]/_}.json" ]; then document=$out/BENCHMARKS.md; fi
done
"$python" -m tools.bench.document "$out" >"$out/document.new"
mv -- "$out/document.new" "$document"
echo "$document written" >&2
if [ "${#failed[@]}" -gt 0 ]; then
    echo "bench_peer.sh: failed: ${failed[*]}; the same command tries them again" >&2
    exit 1
fi
exit 0
}
