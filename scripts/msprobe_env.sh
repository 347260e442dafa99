# shellcheck shell=bash
#
# To source before a recipe is started by hand:
#
#     source scripts/msprobe_env.sh probe.yaml [OUTPUT_DIR] && bash examples/llama2/pretrain_llama2_7b_ptd.sh
#
# Puts the launcher's shim in front of PATH and names the probe file; the recipe itself is not touched. Returns 2 and
# changes nothing where that cannot be done. `msprobe_off` takes both back. With MSPROBE_OVERLAY=HOST/MODEL an overlay
# of scripts/recipes is applied too: a job that it shortens saves nothing, unless MSPROBE_KEEP_SAVE=1.

_msprobe_problem=
if [ -n "${BASH_VERSION:-}" ]; then
    _msprobe_self=${BASH_SOURCE[0]}
    # Allowed in a sourced file only.
    (return 0 2>/dev/null) || _msprobe_problem=run
elif [ -n "${ZSH_VERSION:-}" ]; then
    _msprobe_self=${(%):-%x}
    case ${ZSH_EVAL_CONTEXT:-file} in
        *file*) ;;
        *) _msprobe_problem=run ;;
    esac
else
    _msprobe_self=${MSPROBE_HOME:+$MSPROBE_HOME/scripts/msprobe_env.sh}
    [ "${0##*/}" != msprobe_env.sh ] || _msprobe_problem=run
fi
if [ -n "$_msprobe_problem" ]; then
    echo "msprobe: $0 was run, which changes nothing for what is started after it; accepted: source $0 probe.yaml" >&2
    exit 2
fi

if [ -z "$_msprobe_self" ] || [ ! -f "$_msprobe_self" ]; then
    _msprobe_problem='this shell does not tell where msprobe_env.sh lies; accepted: bash, zsh, or MSPROBE_HOME=CHECKOUT'
elif [ -n "${1:-}" ] && { [ ! -f "$1" ] || [ ! -r "$1" ]; }; then
    _msprobe_problem="$1: no such probe file, nothing is set; accepted: source msprobe_env.sh FILE [OUTPUT_DIR]"
elif [ -z "${1:-}" ] && [ -z "${MSPROBE_CONFIG:-}" ]; then
    _msprobe_problem='no probe file is named, nothing is set; accepted: source msprobe_env.sh FILE, or MSPROBE_CONFIG=FILE'
elif [ -z "${1:-}" ] && [ ! -r "$MSPROBE_CONFIG" ]; then
    _msprobe_problem="MSPROBE_CONFIG: $MSPROBE_CONFIG: no such probe file, nothing is set; accepted: a file"
fi
if [ -n "$_msprobe_problem" ]; then
    printf 'msprobe: %s\n' "$_msprobe_problem" >&2
    unset _msprobe_self _msprobe_problem
    return 2
fi

_msprobe_scripts=$(unset CDPATH && cd -- "$(dirname -- "$_msprobe_self")" && pwd -P)
export MSPROBE_RECIPES=$_msprobe_scripts/recipes
export MSPROBE_SHIMS=$_msprobe_scripts/shims
if [ -n "${1:-}" ]; then
    MSPROBE_CONFIG=$(unset CDPATH && cd -- "$(dirname -- "$1")" && pwd -P)/$(basename -- "$1")
    export MSPROBE_CONFIG
fi
if [ -n "${2:-}" ]; then
    case $2 in
        /*) export MSPROBE_OUTPUT=$2 ;;
        *) export MSPROBE_OUTPUT=$PWD/$2 ;;
    esac
fi
case :$PATH: in
    *":$MSPROBE_SHIMS:"*) ;;
    *) export PATH=$MSPROBE_SHIMS:$PATH ;;
esac
msprobe_off() {
    PATH=$(printf '%s' ":$PATH:" | sed "s|:$MSPROBE_SHIMS:|:|; s|^:||; s|:\$||")
    unset MSPROBE_CONFIG MSPROBE_OUTPUT MSPROBE_SHIMS MSPROBE_RECIPES MSPROBE_OVERLAY MSPROBE_KEEP_SAVE
    unset -f msprobe_off
}
unset _msprobe_self _msprobe_problem _msprobe_scripts
