# shellcheck shell=bash
#
# The Python environment of this checkout. Source this file, then call
#
#     setup_env          what a run needs
#     setup_env dev      and what the tests need
#
# It takes the active virtual environment, else the checkout's .venv, which it makes if it is not there, and puts
# torch, megatron-core and this package into it. What is already there is kept. A second call finds a stamp in the
# environment and does nothing. Afterwards MSPROBE_PYTHON is the interpreter and its directory is first on PATH.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

# The version this project is tested with. Never without a version: a newer torch could arrive over night.
_SETUP_TORCH=2.13.0
# The newest release that Python 3.10 and 3.11 can install (0.17 and later ask for 3.12).
_SETUP_MEGATRON=0.16.1

unset CDPATH
_SETUP_ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

_setup_say() { printf '[setup] %s\n' "$*"; }
_setup_complain() { printf '[setup] %s\n' "$*" >&2; }

# $1 runs and is a Python that torch and megatron-core have builds for.
_setup_suits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# $1 runs and is new enough for this package; in an environment of the user's own, the rest is the user's choice.
_setup_runs() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# A probe must not find the package just because it is started inside the checkout.
_setup_ask() { (cd / && "$MSPROBE_PYTHON" "$@" 2>/dev/null); }

_setup_find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13 python3.10; do
        if command -v "$name" >/dev/null 2>&1 && _setup_suits "$name"; then
            command -v "$name"
            return 0
        fi
    done
    _setup_complain "no Python 3.10 to 3.13 was found (tried ${PYTHON:+$PYTHON, }python3, python3.10 ... python3.13)."
    _setup_complain "Install one, or name one: PYTHON=/path/to/python3.11 bash scripts/..."
    return 1
}

_setup_make_venv() {
    local venv=$1 base options=()
    base=$(_setup_find_python) || return 1
    # A torch that the machine came with is the one to work with, not a second one beside it.
    if (cd / && "$base" -c 'import torch; torch.__version__') >/dev/null 2>&1; then
        options=(--system-site-packages)
    fi
    _setup_say "making .venv with $("$base" -V 2>&1)${options:+, which sees the torch of that Python}"
    "$base" -m venv --clear ${options[@]+"${options[@]}"} "$venv" >/dev/null 2>&1 && return 0
    # Debian ships Python without ensurepip; the pip that is there can put itself into the environment.
    if "$base" -m venv --clear --without-pip ${options[@]+"${options[@]}"} "$venv" &&
        "$base" -m pip --python "$venv/bin/python" install -q --ignore-installed pip; then
        return 0
    fi
    _setup_complain "could not make $venv with $base."
    _setup_complain "Install Python's venv module (python3-venv on Debian and Ubuntu), or activate an environment."
    return 1
}

_setup_choose() {
    local venv
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        venv=$VIRTUAL_ENV
        if ! _setup_runs "$venv/bin/python"; then
            _setup_complain "VIRTUAL_ENV is $venv, but there is no Python 3.10 or newer that runs in it."
            _setup_complain "Activate another environment, or unset VIRTUAL_ENV to have .venv made in the checkout."
            return 1
        fi
    else
        venv=$_SETUP_ROOT/.venv
        if ! _setup_suits "$venv/bin/python"; then
            # --clear below empties the directory: only if it is what remains of an environment.
            if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
                _setup_complain "$venv is there but is not a virtual environment; move it away."
                return 1
            fi
            _setup_make_venv "$venv" || return 1
        fi
        export VIRTUAL_ENV=$venv
    fi
    export MSPROBE_PYTHON=$venv/bin/python
    case ":$PATH:" in
        ":$venv/bin:"*) ;;
        *) export PATH="$venv/bin:$PATH" ;;
    esac
    unset PYTHONHOME
    hash -r
}

# What the environment was set up for: the pins in this file, the package's own requirements, and the checkout.
_setup_key() {
    _setup_ask - "$_SETUP_ROOT" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
parts = [str(root), sys.version]
parts += [(root / name).read_text() for name in ("pyproject.toml", "setup.py", "scripts/setup_env.sh")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

# Cheap: looks for the packages without importing them.
_setup_all_there() {
    _setup_ask - <<'PYTHON'
import importlib.util, sys

sys.exit(not all(importlib.util.find_spec(name) for name in ("torch", "megatron.core", "msprobe_megatron")))
PYTHON
}

# "absent", "there VERSION" or "broken REASON".
_setup_torch_state() {
    _setup_ask - <<'PYTHON'
import importlib.metadata
import importlib.util

if importlib.util.find_spec("torch") is None:
    print("absent")
else:
    try:
        import torch

        # The constraint has to name what pip knows, which may lack the "+cu130" of torch.__version__.
        try:
            print("there", importlib.metadata.version("torch"))
        except importlib.metadata.PackageNotFoundError:
            print("there", torch.__version__)
    except BaseException as error:
        print("broken", type(error).__name__, *str(error).split())
PYTHON
}

_setup_pip() {
    # PIP_USER would send the packages out of the environment.
    PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$MSPROBE_PYTHON" -m pip install --no-input "$@" >>"$_SETUP_LOG" 2>&1
}

_setup_failed() {
    _setup_complain "pip could not install $1. Its last words (all of them are in $_SETUP_LOG):"
    tail -n 12 -- "$_SETUP_LOG" | sed 's/^/    /' >&2
    _setup_complain "Most often the package index cannot be reached or does not have this version: check the network,"
    _setup_complain "'pip config list' and free disk space, then run the same command again; what is installed is kept."
    [ -z "${2:-}" ] || _setup_complain "$2"
}

_setup_install_torch() {
    local state
    state=$(_setup_torch_state) || true
    case $state in
        there*)
            _setup_say "torch ${state#there } is there already: kept"
            ;;
        absent)
            _setup_say "installing torch $_SETUP_TORCH, CPU build (the largest step: 1 to 10 minutes)"
            if ! _setup_pip "torch==$_SETUP_TORCH+cpu"; then
                _setup_say "pip sees no build marked +cpu: taking torch $_SETUP_TORCH as it comes (it may be larger)"
                if ! _setup_pip "torch==$_SETUP_TORCH"; then
                    _setup_failed "torch $_SETUP_TORCH" "Or install a torch (2.6 or newer) yourself: it will be kept."
                    return 1
                fi
            fi
            state=$(_setup_torch_state) || true
            ;;
    esac
    if [ "${state%% *}" != there ]; then
        _setup_complain "there is a torch in $VIRTUAL_ENV, but it cannot be imported: ${state#broken }"
        _setup_complain "It is left as it is. Repair it, or use an environment without it (our own .venv can be deleted)."
        return 1
    fi
    # Nothing installed after this may bring another torch along.
    printf 'torch==%s\n' "${state#there }" >"$_SETUP_CONSTRAINTS"
}

_setup_install_megatron() {
    if _setup_ask -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("megatron.core"))'; then
        _setup_say "megatron.core is there already: kept"
        return 0
    fi
    _setup_say "installing megatron-core $_SETUP_MEGATRON"
    if ! _setup_pip --constraint "$_SETUP_CONSTRAINTS" "megatron-core==$_SETUP_MEGATRON"; then
        _setup_failed "megatron-core $_SETUP_MEGATRON" \
            "It needs torch 2.6 or newer. For an older torch install an older megatron-core yourself: it will be kept."
        return 1
    fi
}

_setup_install_package() {
    local extras=$1
    _setup_say "installing msprobe_megatron${extras:+ and the tools for its tests}, editable, from this checkout"
    # Inside the checkout, so that no character of its path has to get through pip's requirement syntax.
    if ! (cd -- "$_SETUP_ROOT" && _setup_pip --constraint "$_SETUP_CONSTRAINTS" --editable ".${extras:+[$extras]}"); then
        _setup_failed "msprobe_megatron from $_SETUP_ROOT"
        return 1
    fi
}

# setup_env [dev]
setup_env() {
    local extras=${1:-} key stamp
    _setup_choose || return 1
    stamp=$VIRTUAL_ENV/msprobe_megatron_setup
    _SETUP_LOG=$stamp.log
    _SETUP_CONSTRAINTS=$stamp.constraints
    key=$(_setup_key) || {
        _setup_complain "$MSPROBE_PYTHON could not read pyproject.toml and setup.py in $_SETUP_ROOT"
        return 1
    }
    # The tests' environment is also a running environment; the other way round it is not.
    if grep -qsx "$key${extras:+ $extras}" "$stamp" && _setup_all_there; then
        _setup_say "using $VIRTUAL_ENV"
        return 0
    fi
    _setup_say "setting up $VIRTUAL_ENV"
    if ! _setup_ask -c 'import pip' && ! "$MSPROBE_PYTHON" -m ensurepip >/dev/null 2>&1; then
        _setup_complain "$VIRTUAL_ENV has no pip, and ensurepip is not there to bring it; put pip into it first."
        return 1
    fi
    if ! : >"$_SETUP_LOG"; then
        _setup_complain "$VIRTUAL_ENV cannot be written to. Unset VIRTUAL_ENV to have .venv made in the checkout."
        return 1
    fi
    rm -f -- "$stamp"
    _setup_install_torch || return 1
    _setup_install_megatron || return 1
    _setup_install_package "$extras" || return 1
    if ! _setup_all_there; then
        _setup_complain "pip reported success, yet torch, megatron.core or msprobe_megatron is not there; see $_SETUP_LOG"
        return 1
    fi
    printf '%s\n' "$key" ${extras:+"$key $extras"} >"$stamp"
    _setup_say "ready (pip's log: $_SETUP_LOG)"
}

# What several processes on one machine need, unless the user has decided already.
setup_processes() {
    # One thread a process: four processes share the cores already.
    export OMP_NUM_THREADS=1
    # Megatron insists on it for tensor parallelism; harmless without a GPU.
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    # gloo otherwise looks the host name up, which not every machine can resolve.
    if [ -z "${GLOO_SOCKET_IFNAME:-}" ] && [ -e /sys/class/net/lo ]; then
        export GLOO_SOCKET_IFNAME=lo
    fi
}
