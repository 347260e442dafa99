#!/usr/bin/env bash
#
# Runs an untouched launch recipe under the kit:
#
#     bash scripts/msprobe_run.sh [--overlay NAME] [--config FILE] [--emit OUT.sh] -- recipe.sh args…
#     bash scripts/msprobe_run.sh --rehearse --overlay NAME -- recipe.sh args…        where there is no accelerator
#
# Uses $MSPROBE_PYTHON, else the python on PATH; the kit must be installed in it. --help lists everything.

# `sh scripts/msprobe_run.sh` works too.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
unset CDPATH
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
export MSPROBE_RECIPES=$scripts/recipes MSPROBE_SHIMS=$scripts/shims
here=$MSPROBE_SHIMS
# shellcheck source=scripts/shims/real.bash
source "$MSPROBE_SHIMS/real.bash"
require_kit
export MSPROBE_PYTHON
case :$PATH: in
    *":$MSPROBE_SHIMS:"*) ;;
    *) export PATH=$MSPROBE_SHIMS:$PATH ;;
esac
exec "$MSPROBE_PYTHON" -m msprobe_megatron.launching.recipe "$@"
