#!/usr/bin/env bash
#
# Puts `import msprobe_megatron.adaptor` into the training script of a checkout, or takes it out again.
#
#     bash patches/source/apply.sh CHECKOUT               apply
#     bash patches/source/apply.sh --check CHECKOUT       say which patch fits; change nothing
#     bash patches/source/apply.sh --reverse CHECKOUT     take it out
#
# Exit code 0: done. 1: refused, because it is applied already (or, with --reverse, is not). 2: no patch fits.

set -euo pipefail
unset CDPATH

usage() { sed -n '5,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
say() { printf 'msprobe: %s\n' "$*" >&2; }

action=apply
case ${1:-} in
    -h | --help) usage; exit 0 ;;
    --check | --reverse) action=${1#--}; shift ;;
esac
if [ $# -ne 1 ]; then
    usage >&2
    exit 2
fi
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
if [ ! -f "$1/pretrain_gpt.py" ]; then
    say "$1: there is no pretrain_gpt.py in it; accepted: a checkout of Megatron-LM, ModelLink or MindSpeed-LLM"
    exit 2
fi
checkout=$(cd -- "$1" && pwd -P)

# A tree that was copied into another repository must not be taken for a part of that one.
git_apply() { GIT_CEILING_DIRECTORIES=$(dirname -- "$checkout") git -C "$checkout" apply "$@"; }
fitting() {
    local patch
    for patch in "$here"/*.patch; do
        if git_apply "$@" --check "$patch" 2>/dev/null; then
            printf '%s\n' "$patch"
            return
        fi
    done
}

if grep -q '^import msprobe_megatron\.adaptor' "$checkout/pretrain_gpt.py"; then
    if [ "$action" != reverse ]; then
        say "$checkout/pretrain_gpt.py: already has the line; accepted: --reverse to take it out"
        exit 1
    fi
    patch=$(fitting --reverse)
    options=(--reverse)
else
    if [ "$action" = reverse ]; then
        say "$checkout/pretrain_gpt.py: does not have the line; nothing to take out"
        exit 1
    fi
    patch=$(fitting)
    options=()
fi
if [ -z "$patch" ]; then
    say "$checkout/pretrain_gpt.py: no patch fits this release; accepted: -m msprobe_megatron.run, or the line" \
        "'import msprobe_megatron.adaptor' put in by hand before any other import"
    exit 2
fi
if [ "$action" = check ]; then
    printf '%s fits\n' "${patch##*/}"
    exit 0
fi
git_apply "${options[@]+"${options[@]}"}" "$patch"
printf '%s: %s\n' "${patch##*/}" "$([ "$action" = reverse ] && echo 'taken out' || echo applied)"
