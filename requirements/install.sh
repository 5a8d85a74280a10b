#!/bin/sh
# Installs the packages of requirements/GROUP.txt, then Quire itself: sh requirements/install.sh PYTHON GROUP [--editable] .
# Without the last arguments, it installs the packages only.
# pip accepts only files whose hashes are there: wheels, and the source distributions of GROUP-sources.txt. It follows no
# package's own requirements: the files have them all.
set -eu
python=$1 group=$2
shift 2
here=$(dirname "$0")

pip() { "$python" -m pip --disable-pip-version-check "$@"; }
locked() { pip install --no-deps --only-binary :all: --require-hashes --requirement "$here/$1.txt"; }

locked "$group"
if [ -f "$here/$group-sources.txt" ]; then
    # --no-build-isolation: setuptools is the one in the group's file.
    pip install --no-deps --no-build-isolation --use-pep517 --require-hashes --requirement "$here/$group-sources.txt"
fi
case $group in dev | worker | client-guidellm | client-lm-eval | bench-*)
    # A CPU build of torch where pip finds one, in an index or folder that its settings name; otherwise PyPI's.
    cpu=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$here/torch-cpu.txt")
    if pip index versions torch 2>/dev/null | grep --quiet --fixed-strings "$cpu"; then
        locked torch-cpu
    else
        locked torch-cuda
    fi
    ;;
esac
[ $# -eq 0 ] || pip install --no-deps --no-build-isolation "$@"
