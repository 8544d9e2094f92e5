# Sourced by the make_*_env scripts beside it. make_env DIR STAMP COMMAND...: a virtual environment in DIR, made once: a stamp in it holds
# what was installed, so a second call costs nothing, and one that was interrupted begins anew. COMMAND installs, with PIP set.
# shellcheck shell=bash

log() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# The help text of a script is the comment at its top.
show_help() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; }

make_env() {
    local target=$1 stamp=$2
    shift 2
    if [[ -f $target/.peer_env && $(<"$target/.peer_env") == "$stamp" ]]; then
        log "$target is ready"
        return
    fi
    if [[ -e $target && ! -f $target/pyvenv.cfg ]]; then
        log "error: $target is there and is no virtual environment; name another folder"
        exit 2
    fi
    log "making $target"
    "${PYTHON:-python3}" -m venv --clear "$target"
    PIP=("$target/bin/python" -m pip install --quiet --disable-pip-version-check)
    "$@"
    printf '%s' "$stamp" >"$target/.peer_env"
    log "$target is ready"
}

main() { # STAMP COMMAND ARGUMENTS...
    local stamp=$1 command=$2
    shift 2
    case ${1:-} in
    -h | --help)
        show_help
        exit 0
        ;;
    '' | -*)
        log "error: give one folder for the environment"
        exit 2
        ;;
    esac
    if (($# > 1)); then
        log "error: give one folder for the environment"
        exit 2
    fi
    make_env "$1" "$stamp" "$command"
}
