# shellcheck shell=bash
# Finds the program a shim stands in for: the next of its name on PATH. Sets MSPROBE_PYTHON if nobody has.

# The next program called $1 on PATH outside the shims' own folder.
real_program() {
    local part found
    local IFS=:
    for part in $PATH; do
        if [ "$part" = "$here" ] || [ "$part" = "${MSPROBE_SHIMS:-}" ]; then
            continue
        fi
        found=${part:-.}/$1
        if [ -f "$found" ] && [ -x "$found" ]; then
            printf '%s\n' "$found"
            return 0
        fi
    done
    printf 'msprobe: %s: not found on PATH behind %s\n' "$1" "$here" >&2
    return 127
}

if [ -z "${MSPROBE_PYTHON:-}" ]; then
    MSPROBE_PYTHON=$(real_program python3 2>/dev/null || real_program python) || exit 127
fi

# A sentence instead of Python's traceback where the kit is missing.
require_kit() {
    if ! "$MSPROBE_PYTHON" -c 'import msprobe_megatron.hosts.launching' >/dev/null 2>&1; then
        printf 'msprobe: the kit is not installed in %s; accepted: pip install -e %s, or MSPROBE_PYTHON=…\n' \
            "$MSPROBE_PYTHON" "$(cd -- "$here/../.." && pwd -P)" >&2
        exit 2
    fi
}
