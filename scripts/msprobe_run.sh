#!/usr/bin/env bash
#
# `msprobe-megatron launch` from a checkout, with $MSPROBE_PYTHON, else the python on PATH; --help lists everything:
#
#     bash scripts/msprobe_run.sh [--overlay NAME] [--config FILE] [--rehearse] -- recipe.sh args…

# `sh scripts/msprobe_run.sh` works too.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
here=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/shims" && pwd -P)
# shellcheck source=scripts/shims/real.bash
source "$here/real.bash"
require_kit
exec "$MSPROBE_PYTHON" -m msprobe_megatron launch "$@"
