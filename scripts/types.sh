#!/usr/bin/env bash
#
# mypy on the package as it is installed: patches/ lies at the top of the tree but is imported as
# msprobe_megatron.patches, which setup.py knows and mypy does not. A directory of links shows mypy that shape.
# Uses $MSPROBE_PYTHON, else the python on PATH. Arguments go to mypy.

set -euo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
view=$root/.mypy_cache/as_installed

rm -rf -- "$view"
mkdir -p -- "$view/msprobe_megatron"
ln -s -- "$root"/msprobe_megatron/* "$root/patches" "$view/msprobe_megatron/"
cd -- "$view"
exec "${MSPROBE_PYTHON:-python}" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache/installed" \
    "$@" --package msprobe_megatron
