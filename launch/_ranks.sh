# Sourced by the scripts that start ranks with torchrun, after _environment.sh: the interpreter, and checks of arguments.
# shellcheck shell=bash

# Sets PYTHON: the caller's, or that of the checkout's environment, or python3. Installs nothing; the checkout's own code is run.
use_python() {
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python3
        [[ ! -x $VENV/bin/python ]] || PYTHON=$VENV/bin/python
    fi
    "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
        die "$PYTHON does not run or has no torch; launch/quickstart makes $VENV, or name an interpreter with PYTHON=/path/to/python"
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # each rank sets its own number later; unset, torchrun warns
}

require_count() { # NAME VALUE
    [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || usage_error "$1 '$2' is not a number above 0; see launch/${0##*/} --help"
}
