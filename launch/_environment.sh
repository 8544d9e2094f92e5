# Sourced by the scripts beside it: finds or makes the project's virtual environment, once.
#
# A script calls `parse_common "$@"` (takes --venv and --system-torch out, leaves the others in REST) and then
# `ensure_environment EXTRA...`, which leaves the environment's interpreter in VENV_PYTHON. A stamp in the environment
# names what was installed from which pyproject.toml, so a later start costs a hash and no pip.
# Where packages come from is pip's own configuration; no index is named here.
# shellcheck shell=bash

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
SYSTEM_TORCH=no
REST=()
OLDEST_TORCH=2.11 # the same bound as in pyproject.toml
CPU_TORCH=2.13.0  # an open range resolves to a CUDA build of several GB

log() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { log "error: $*"; exit 1; }
usage_error() { log "error: $*"; exit 2; }

# The help text of a script is the comment at its top.
show_help() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; exit 0; }

parse_common() {
    while (($#)); do
        case $1 in
        --venv)
            [[ -n ${2:-} ]] || usage_error "--venv needs a directory"
            VENV=$2
            shift
            ;;
        --venv=?*) VENV=${1#--venv=} ;;
        --venv=) usage_error "--venv needs a directory" ;;
        --system-torch) SYSTEM_TORCH=yes ;;
        -h | --help) show_help ;;
        *) REST+=("$1") ;;
        esac
        shift
    done
    [[ $VENV == /* ]] || VENV=$PWD/$VENV
    VENV_PYTHON=$VENV/bin/python
}

ensure_environment() { # EXTRA...
    local current
    # One environment serves one checkout (the install is editable), so the stamp holds the checkout's path too.
    current=$({ printf '%s\n' "$ROOT"; cat "$ROOT/pyproject.toml"; } | sha256sum)
    current=${current%% *}
    if ! environment_is_current "$current" "$@"; then
        mkdir -p "$VENV" || die "cannot make $VENV; choose another place with --venv DIR"
        local lock
        exec {lock}<"$VENV"
        flock --nonblock "$lock" || { log "waiting for another start that prepares $VENV"; flock "$lock"; }
        environment_is_current "$current" "$@" || install_environment "$current" "$@"
        exec {lock}<&-
    fi
    if [[ $SYSTEM_TORCH == yes ]] && ! grep -qi '^include-system-site-packages *= *true' "$VENV/pyvenv.cfg"; then
        die "$VENV was made without --system-torch; remove it or choose another with --venv DIR"
    fi
}

environment_is_current() { # HASH EXTRA...
    local found=() extra
    [[ -x $VENV_PYTHON && -f $VENV/.tp_residual-installed ]] || return 1
    read -ra found <"$VENV/.tp_residual-installed" || true
    [[ ${found[0]:-} == "$1" ]] || return 1
    for extra in "${@:2}"; do
        [[ " ${found[*]:1} " == *" $extra "* ]] || return 1
    done
}

install_environment() { # HASH EXTRA...
    local current=$1 started=$SECONDS stamp=$VENV/.tp_residual-installed extras torch before
    # What earlier starts installed stays installed when pyproject.toml changes.
    extras=$({ printf '%s\n' "${@:2}"; [[ ! -f $stamp ]] || cut -s -d' ' -f2- "$stamp" | tr ' ' '\n'; } | sort -u | paste -sd,)
    rm -f "$stamp" # a start that dies from here on leaves no claim behind

    make_venv
    "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$VENV has $("$VENV_PYTHON" --version); Python >= 3.11 is needed; choose another with --venv DIR"
    torch=$(torch_version "$VENV_PYTHON")
    if [[ -n $torch ]]; then
        torch_is_new_enough "$torch" ||
            die "torch $torch in $VENV is older than $OLDEST_TORCH; update it or choose another environment with --venv DIR"
        check_torch_stays "$torch" "$extras"
    elif [[ $SYSTEM_TORCH == yes ]]; then
        die "--system-torch: no torch is visible from $VENV (it sees the packages of its base Python, not those of another virtual environment; name such an environment with --venv DIR)"
    elif ! has_nvidia_gpu; then
        log "installing torch $CPU_TORCH (CPU build: no NVIDIA GPU here)"
        pip_install "torch==$CPU_TORCH"
    fi
    log "installing tp_residual[$extras]; the first time takes a minute or two"
    before=$(torch_version "$VENV_PYTHON")
    pip_install --editable "$ROOT[$extras]"
    torch=$(torch_version "$VENV_PYTHON")
    [[ -z $before || $before == "$torch" ]] || die "pip changed torch from $before to $torch in $VENV"
    compile_packages

    printf '%s %s\n' "$current" "${extras//,/ }" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    log "environment $VENV ready after $((SECONDS - started)) s"
}

make_venv() {
    if [[ -f $VENV/pyvenv.cfg ]] && "$VENV_PYTHON" -c '' 2>/dev/null; then
        "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 && return
        quietly "$VENV_PYTHON" -m ensurepip --default-pip # a start was stopped half-way, or another tool made it
        return
    fi
    [[ -f $VENV/pyvenv.cfg || -z $(ls -A "$VENV") ]] ||
        die "$VENV is not empty and no virtual environment; choose another with --venv DIR"
    local python options=()
    [[ $SYSTEM_TORCH == no ]] || options=(--system-site-packages)
    python=$(find_python) || { rmdir "$VENV"; exit 1; }
    log "making $VENV with $("$python" --version)"
    quietly "$python" -m venv "${options[@]}" "$VENV"
}

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.14) wanted="Python >= 3.11 with venv and ensurepip"
    local probe="import ensurepip, importlib.metadata, sys, venv; assert sys.version_info >= (3, 11)"
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    if [[ $SYSTEM_TORCH == yes ]]; then
        probe+="; importlib.metadata.version('torch')"
        wanted+=", and torch >= $OLDEST_TORCH,"
    fi
    for candidate in "${candidates[@]}"; do
        "$candidate" -c "$probe" >/dev/null 2>&1 && { printf '%s\n' "$candidate"; return; }
    done
    die "$wanted is needed, tried: ${candidates[*]}; install it (Debian, Ubuntu: python3-venv) or name one with PYTHON=/path/to/python"
}

torch_version() { # PYTHON; empty where there is none
    "$1" -c '
import importlib.metadata
try:
    print(importlib.metadata.version("torch"))
except importlib.metadata.PackageNotFoundError:
    pass'
}

torch_is_new_enough() { # VERSION
    [[ $(printf '%s\n' "$OLDEST_TORCH" "$1" | sort -V | head -n 1) == "$OLDEST_TORCH" ]]
}

has_nvidia_gpu() {
    [[ -e /dev/nvidia0 ]] || nvidia-smi -L 2>/dev/null | grep -q GPU # WSL has no /dev/nvidia0
}

# Someone's torch is theirs: pip's own dry run has to say that it stays.
check_torch_stays() { # VERSION EXTRAS
    local report=$VENV/.tp_residual-report.json planned
    log "checking that torch $1 stays (pip's dry run)"
    quietly "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input --dry-run --report "$report" \
        --editable "$ROOT[$2]"
    planned=$("$VENV_PYTHON" -c '
import json, sys
for item in json.load(open(sys.argv[1]))["install"]:
    if item["metadata"]["name"].lower() == "torch":
        print(item["metadata"]["version"])' "$report")
    rm -f "$report"
    [[ -z $planned ]] ||
        die "installing would change torch from $1 to $planned in $VENV, so nothing was installed; remove that environment or choose another with --venv DIR"
}

pip_install() {
    quietly "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input --no-compile "$@"
}

# pip compiles on one core, and most of what it compiles is Transformers' model zoo, which nothing here imports:
# 14 s less on two cores. Some packages ship files that do not compile, hence the ignored status.
compile_packages() {
    local packages
    packages=$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$VENV_PYTHON" -m compileall -q -j 0 -x '/transformers/models/|/tests/' "$packages" >/dev/null 2>&1 || true
}

quietly() {
    local output=$VENV/.tp_residual-log
    "$@" >"$output" 2>&1 || {
        tail -n 30 "$output" >&2
        die "this command failed: $*"
    }
}
