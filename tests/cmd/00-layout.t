#!/bin/sh
# The tree keeps its shape, and the checker sees each kind of fault.
root=$PWD
n=0 rc=0
ok() { n=$((n + 1)); echo "ok $n - $1"; }
not_ok() { n=$((n + 1)); rc=1; echo "not ok $n - $1"; printf '%s\n' "$2" | sed 's/^/# /'; }
clean() { if out=$("$root/scripts/check-layout" "$1" 2>&1); then ok "$2"; else not_ok "$2" "$out"; fi; }
# The checker must exit 1 and name the file.
faulty() {
    out=$("$root/scripts/check-layout" "$1" 2>&1); got=$?
    case $got/$out in 1/*"$2"*) ok "$3" ;; *) not_ok "$3" "exit $got: $out" ;; esac
}
echo 1..18

clean top "only known names at the top"
clean floors "no include runs upwards"
clean sizes "no tracked file over 1 MiB"
clean scripts "scripts parse"
clean man "man pages lint"

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1
git init -q . || exit 1
mkdir -p libcommon/base libcommon/kv libcommon/engine kernels/cpu cmd scripts man
put() { cat >"$1"; git add "$1"; }
put libcommon/base/a.h </dev/null
put libcommon/kv/b.h </dev/null
put kernels/kernels.h </dev/null
put kernels/cpu/vec.h </dev/null
printf '#include "../base/a.h"\n#include "b.h"\n#include "../../kernels/kernels.h"\n' | put libcommon/kv/good.c
printf '#include "vec.h"\n#include "../kernels.h"\n' | put kernels/cpu/good.c
clean floors "downward and sideways includes are fine"
clean top "a small good tree is fine at the top"

printf '# include "../kv/b.h"\n' | put libcommon/base/up.c
faulty floors libcommon/base/up.c:1 "an include that runs up is seen"
git rm -qf libcommon/base/up.c
printf '#include "./../../libcommon/kv/../engine/../../libcommon/engine/x.h"\n' | put libcommon/kv/winding.h
faulty floors libcommon/kv/winding.h:1 "an include on a winding way is seen"
git rm -qf libcommon/kv/winding.h
printf '#include "../../kernels/cpu/vec.h"\n' | put libcommon/kv/deep.c
faulty floors libcommon/kv/deep.c:1 "a way around kernels.h is seen"
git rm -qf libcommon/kv/deep.c
printf '#include "../../libcommon/kv/b.h"\n' | put kernels/cpu/out.c
faulty floors kernels/cpu/out.c:1 "a kernel that includes the library is seen"
git rm -qf kernels/cpu/out.c
mkdir -p libcommon/misc
put libcommon/misc/m.c </dev/null
git add libcommon/misc/m.c; echo 'int x;' >libcommon/misc/m.c
faulty floors libcommon/misc "a folder that is no floor is seen"
git rm -qf libcommon/misc/m.c
echo x | put notes.txt
faulty top notes.txt "a stray file at the top is seen"
head -c 1048577 /dev/zero | put scripts/big
faulty sizes scripts/big "a large file is seen"
printf '#!/bin/sh\nif true; then\n' | put scripts/broken; chmod +x scripts/broken
faulty scripts scripts/broken "a script that does not parse is seen"
git rm -qf scripts/broken
printf '#!/usr/bin/env python3\nif True\n' | put scripts/snake; chmod +x scripts/snake
faulty scripts scripts/snake "a Python script that does not parse is seen"
git rm -qf scripts/snake
printf '#!/bin/sh\n' | put scripts/plain
faulty scripts scripts/plain "a script that cannot be run is seen"
printf '.Dd January 1, 2026\n.Dt X 1\n.Os\n.Sh NAME\n.Nm x\n.Nd y\n.Bogus\n' | put man/x.1
faulty man man/x.1 "a man page with an unknown macro is seen"
exit $rc
