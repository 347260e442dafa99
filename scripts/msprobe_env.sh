# shellcheck shell=bash
#
# To source before a recipe is started by hand:
#
#     source scripts/msprobe_env.sh probe.yaml [OUTPUT_DIR]
#     bash examples/llama2/pretrain_llama2_7b_ptd.sh
#
# Puts the launcher's shim in front of PATH and names the probe file; the recipe itself is not touched.
# `msprobe_off` takes both back. With MSPROBE_OVERLAY=HOST/MODEL an overlay of scripts/recipes is applied too.

if [ -n "${BASH_VERSION:-}" ]; then
    _msprobe_self=${BASH_SOURCE[0]}
elif [ -n "${ZSH_VERSION:-}" ]; then
    _msprobe_self=${(%):-%x}
else
    _msprobe_self=${MSPROBE_HOME:+$MSPROBE_HOME/scripts/msprobe_env.sh}
fi
if [ -z "$_msprobe_self" ] || [ ! -f "$_msprobe_self" ]; then
    echo 'msprobe: this shell does not tell where msprobe_env.sh lies; accepted: bash, zsh, or MSPROBE_HOME=CHECKOUT' >&2
else
    _msprobe_scripts=$(unset CDPATH && cd -- "$(dirname -- "$_msprobe_self")" && pwd -P)
    export MSPROBE_RECIPES=$_msprobe_scripts/recipes
    export MSPROBE_SHIMS=$_msprobe_scripts/shims
    if [ -n "${1:-}" ]; then
        if [ -f "$1" ]; then
            MSPROBE_CONFIG=$(unset CDPATH && cd -- "$(dirname -- "$1")" && pwd -P)/$(basename -- "$1")
            export MSPROBE_CONFIG
        else
            echo "msprobe: $1: no such probe file" >&2
        fi
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
        unset MSPROBE_CONFIG MSPROBE_OUTPUT MSPROBE_SHIMS MSPROBE_RECIPES MSPROBE_OVERLAY
        unset -f msprobe_off
    }
fi
unset _msprobe_self _msprobe_scripts
