#!/bin/sh
# `make install` puts everything where it belongs, and a program of somebody else's builds against what was installed.
cd "$(dirname "$0")/../.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
n=0 rc=0
t() { # t NAME COMMAND...
    name=$1; shift; n=$((n + 1))
    if "$@" >"$tmp/out" 2>&1; then echo "ok $n - $name"; else echo "not ok $n - $name"; sed 's/^/# /' "$tmp/out" >&2; rc=1; fi
}
echo 1..4
t "make install" make -s V="${V-}" install DESTDIR="$tmp/root" PREFIX=/usr
r=$tmp/root/usr
there() { for f in bin/pd-prefill bin/pd-decode bin/pd-route bin/pd-kvsend bin/pd-up bin/pd-trace bin/pd-bench lib/libpd.a lib/pd/hdf5-plugin/libH5Zzstd.so share/man/man7/pd.7 share/man/man1/pd-prefill.1 \
    share/man/man5/pd-wire.5 share/bash-completion/completions/pd-decode; do [ -s "$r/$f" ] || { echo "no $f"; return 1; }; done; }
t "commands, library, plug-in, pages and completion are there" there
{ echo '#include <stdio.h>'; cd "$r/include/pd" && find . -name '*.h' | sed 's|^\./\(.*\)|#include "\1"|' | sort
  echo 'int main(void) { char run[PD_RUN_LEN + 1]; struct pd_err e; if (pd_run_new(run, &e)) return 1; puts(run); return !pd_kernels_cpu(NULL, &(const char *){ NULL }); }'; } >"$tmp/user.c"
san= ; [ "${V-}" != asan ] || san=-fsanitize=address,undefined ; [ "${V-}" != tsan ] || san=-fsanitize=thread
libs="popt msgpack hdf5 libzstd libxxhash libcrypto jansson libpcre2-8 libpng"
t "a program that includes every header builds" ${CC:-cc} -std=gnu11 -D_GNU_SOURCE $san -I"$r/include/pd" $(pkg-config --cflags $libs) "$tmp/user.c" -o "$tmp/user" "$r/lib/libpd.a" $(pkg-config --libs $libs) -lm -pthread
t "and runs" "$tmp/user"
exit $rc
