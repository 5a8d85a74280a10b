#!/bin/sh
# The C++ compiler of `make sanitize`. PROCESSOR: which instructions the kernels are compiled for, as -march names them, or
# "amx" for this processor's with AMX emulated.
unset LD_PRELOAD
sanitizers="-g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
case "$PROCESSOR $*" in
amx\ *" -m"*) set -- "$@" -include "$(dirname "$0")/amx_emulation.h" ;;
*library.cpp*) set -- "$@" "-march=${PROCESSOR:-native}" ;;
esac
# The compiler's own headers begin vectors with undefined values, which it finds only with other optimizations than usual.
# shellcheck disable=SC2086
exec c++ "$@" -O1 -Wno-maybe-uninitialized -Wno-uninitialized $sanitizers
