#!/usr/bin/env bash
#
# Makes an environment in which recipes of ModelLink or MindSpeed-LLM can be rehearsed without an NPU, from checkouts.
#
#     bash scripts/rehearsal_env.sh --host ~/ModelLink --mindspeed ~/MindSpeed --megatron ~/Megatron-LM --env ~/rehearsal
#
#     --host       checkout of ModelLink or MindSpeed-LLM; megatron/ is copied into it, as its installation tells to,
#                  unless one is there
#     --mindspeed  checkout of MindSpeed, at the commit that the host's installation names
#     --megatron   checkout of Megatron-LM, at the release that the host's installation names; may be left out if the
#                  host has its megatron/
#     --env        folder of the virtual environment; one that is there is completed
#     --python     interpreter to make it with (3.10 to 3.13); else python3.10, else python3
#     --torch      release of torch; else 2.1.0 for ModelLink and 2.7.1 for MindSpeed-LLM, as these are documented
#
# Packages come from wherever your pip gets them. No checkout is moved to another commit. At its end the script imports
# the host as a rehearsal does, and prints the lines that start one. pip's log: ENV/rehearsal_env.log.

set -euo pipefail
unset CDPATH PYTHONPATH PYTHONHOME

complain() { printf 'rehearsal_env: %s\n' "$*" >&2; }
say() { printf 'rehearsal_env: %s\n' "$*"; }
usage() { sed -n '3,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

kit=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
host='' mindspeed='' megatron='' environment='' base='' torch=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --host | --mindspeed | --megatron | --env | --python | --torch)
            [ $# -ge 2 ] || {
                complain "$1: no value is given"
                exit 2
            }
            case $1 in
                --host) host=$2 ;;
                --mindspeed) mindspeed=$2 ;;
                --megatron) megatron=$2 ;;
                --env) environment=$2 ;;
                --python) base=$2 ;;
                --torch) torch=$2 ;;
            esac
            shift 2
            ;;
        *)
            complain "$1: not an option; accepted: --host, --mindspeed, --megatron, --env, --python, --torch"
            exit 2
            ;;
    esac
done

# $1 option, $2 its value, $3 what a checkout of that kind has: the absolute path.
checkout() {
    if [ -z "$2" ]; then
        complain "$1 is not given; accepted: the path of a checkout that has $3"
        exit 2
    fi
    if [ ! -e "$2/${3%% *}" ]; then
        complain "$1: $2 has no ${3%% *}; accepted: the path of a checkout that has $3"
        exit 2
    fi
    (cd -- "$2" && pwd -P)
}

case $(ls -d -- "$host"/modellink "$host"/mindspeed_llm 2>/dev/null) in
    *mindspeed_llm) name=mindspeed_llm title=MindSpeed-LLM documented=2.7.1 release=core_v0.12.1 ;;
    *modellink) name=modellink title=ModelLink documented=2.1.0 release=core_r0.6.0 ;;
    *)
        complain "--host: ${host:-nothing} has neither modellink/ nor mindspeed_llm/; accepted: a checkout of either"
        exit 2
        ;;
esac
host=$(checkout --host "$host" "requirements.txt") || exit
mindspeed=$(checkout --mindspeed "$mindspeed" "mindspeed and setup.py (MindSpeed)") || exit
if [ ! -d "$host/megatron/training" ]; then
    megatron=$(checkout --megatron "$megatron" "megatron/training (Megatron-LM, $release for $title)") || exit
fi
if [ -z "$environment" ] || { [ -e "$environment" ] && [ ! -e "$environment/pyvenv.cfg" ]; }; then
    complain "--env: ${environment:-nothing} is no virtual environment; accepted: one, or a path where nothing is yet"
    exit 2
fi
torch=${torch:-$documented}
if [ -z "$base" ]; then
    base=$(command -v python3.10 || command -v python3 || true)
    # A version manager's python3.10 may be there and refuse to start.
    "$base" -V >/dev/null 2>&1 || base=$(command -v python3 || true)
fi
if ! "$base" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
    complain "--python: ${base:-no python3 on PATH} is no Python 3.10 to 3.13, which the kit needs"
    exit 2
fi

if [ ! -e "$environment/pyvenv.cfg" ]; then
    say "$("$base" -V 2>&1) -> $environment"
    "$base" -m venv "$environment"
fi
environment=$(cd -- "$environment" && pwd -P)
python=$environment/bin/python
log=$environment/rehearsal_env.log
: >"$log"
# For every pip below, those that a setup.py starts among them: one torch; NumPy 1, for which torch before 2.3 and the
# hosts are built; a setuptools that still has pkg_resources, which Megatron of that time imports.
export PIP_CONSTRAINT=$environment/rehearsal_env.constraints PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
printf 'torch==%s\nnumpy<2\nsetuptools<81\n' "$torch" >"$PIP_CONSTRAINT"

# $1 what, the rest pip's words.
get() {
    local what=$1
    shift
    say "installing $what"
    if ! "$python" -m pip install --no-input "$@" >>"$log" 2>&1; then
        complain "pip could not install $what: $(grep -i '^ *error' "$log" | tail -n 1)"
        complain "all that pip said: $log; run the same line again when that is mended, what is installed is kept"
        exit 1
    fi
}

get "build tools" pip 'setuptools<81' wheel pybind11
if ! "$python" -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' \
    "$torch" >/dev/null 2>&1; then
    # The small build where pip sees one; its version has a suffix that the constraint allows.
    "$python" -m pip install --no-input "torch==$torch+cpu" >>"$log" 2>&1 || get "torch $torch (no +cpu build)" "torch==$torch"
fi
# Packages for the NPU alone have no build for this machine; nothing that is rehearsed imports them.
grep -v -i '^[a-z0-9_.-]*npu' "$host/requirements.txt" >"$environment/requirements.txt"
skipped=$(grep -i '^[a-z0-9_.-]*npu' "$host/requirements.txt" | tr '\n' ' ' || true)
[ -z "$skipped" ] || say "left out of requirements.txt, for NPUs alone: $skipped"
get "$title's requirements.txt" -r "$environment/requirements.txt"
get "MindSpeed's requirements.txt" -r "$mindspeed/requirements.txt"
# Its setup.py starts pip, which an isolated build does not have.
get "MindSpeed, editable" --no-build-isolation --no-deps --editable "$mindspeed"
get "msprobe_megatron, editable" --editable "$kit"

if [ -d "$host/megatron/training" ]; then
    say "$host has a megatron/: kept"
else
    say "copying $megatron/megatron into $host"
    cp -r -- "$megatron/megatron" "$host/"
fi

say "importing $title as a rehearsal does"
if ! (cd -- "$host" && "$python" -W ignore -c "
import pathlib
from msprobe_megatron.job.devices import megatron_on_cpu
from msprobe_megatron.hosts.rehearsal.finding import needed_by, offer

megatron_on_cpu.install()
offer(needed_by(pathlib.Path()))
import $name
import megatron.training") >>"$log" 2>&1; then
    complain "it cannot be imported: $(tail -n 1 "$log") (all of it: $log)"
    exit 1
fi
if [ "$name" = modellink ]; then
    overlay=modellink/llama2_7b recipe=examples/llama2/pretrain_llama2_7b_ptd.sh
else
    overlay=mindspeed_llm/qwen3_8b recipe=examples/mcore/qwen3/pretrain_qwen3_8b_4K_ptd.sh
fi
# Recipes move between releases; `overlays` names the others.
[ -e "$host/$recipe" ] || recipe=RECIPE
say "ready. A rehearsal (other overlays: msprobe-megatron overlays):"
printf '\n    source %q\n    cd %q\n    msprobe-megatron launch --rehearse --overlay %s -- %s\n' \
    "$environment/bin/activate" "$host" "$overlay" "$recipe"
