#!/bin/bash
# pd-up: what it starts, what it says, and that nothing is left of a set however it ends. With commands that pretend; 59-set.t has the real ones.
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
up() { run env B="$tmp" timeout 60 scripts/pd-up "$@"; }
told() { grep -qF -- "$1" "$tmp/err"; }
# Nothing runs any more that was started from here; at once, or within two seconds.
gone() { for _ in $(seq 40); do pgrep -f "$tmp/bin/" >/dev/null || return 0; sleep 0.05; done; pgrep -af "$tmp/bin/" >&2; return 1; }
left() { (cd "$tmp/d" && ls -A | tr '\n' ' '); }
M=$tmp/model.gguf
: >"$M"

# A daemon that writes its arguments down, is ready, and ends when told to; options make it misbehave.
mkdir "$tmp/bin" "$tmp/d"
cat >"$tmp/bin/pd-route" <<'END'
#!/bin/bash
name=${0##*/} args=$* sock= late=0 status=0
if [ "$1 ${2%%:*}" = "--status unix" ]; then            # pd-route, asked by pd-up
    cat "$(dirname "${2#unix:}")/seen" 2>/dev/null || echo "workers_ready 64"
    exit 0
fi
[ "$1" != --check ] || exit 0
trap 'echo "$name: drained"; rm -f "$sock"; exit $status' TERM
trap 'echo "$name: interrupted"; exit 99' INT
while [ $# -gt 0 ]; do
    case $1 in
        --listen) sock=${2#unix:}; : >"$sock" ;;
        --trace) : >"$2" ;;
        --fail) echo "$name: this cannot work"; exit 5 ;;
        --status) status=$2 ;;
        --never) late=1000 ;;
        --stubborn) trap '' TERM ;;
        --later) ( sleep 0.6; kill -SEGV $$ ) & ;;
    esac
    shift
done
echo "$name: $args"
ls -l /proc/$$/fd | grep -q lock && echo "$name: has the lock"
for ((i = 0; i < late * 10; i++)); do sleep 0.1; done
echo READY=1 >&3
while :; do sleep 0.05; done
END
chmod +x "$tmp/bin/pd-route"
cp "$tmp/bin/pd-route" "$tmp/bin/pd-prefill"
cp "$tmp/bin/pd-route" "$tmp/bin/pd-decode"

# ---- what is refused ----

refused() {     # refused WORDS OPTION...: status 2, one line that has the words
    local words=$1; shift
    up "$@"
    check "refused: $words" eval '[ $got = 2 ] && told "$words" && [ "$(wc -l <"$tmp/err")" = 1 ] && [ ! -s "$tmp/out" ]'
}
refused "which set?"
refused "-m: a model file is needed" 1P1D
refused "$tmp/none cannot be read" 1P1D -m "$tmp/none"
refused "'1X' is no set" 1X -m "$M"
refused "'P' is no set" P -m "$M"
refused "'0P0D' has no workers" 0P0D -m "$M"
refused "'2P' has nobody to decode (example: 2P1D)" 2P -m "$M"
refused "'65D' has 65 workers" 65D -m "$M"
refused "one set at a time" 1P1D 2P1D -m "$M"
refused "--nonsense: unknown option" 1P1D --nonsense
refused "--grace: 'soon' is no number of seconds" 1P1D --grace soon
refused "--dir: its value is missing" 1P1D --dir
refused "--: no command comes after it" 1P1D -m "$M" --
refused "is too long for the name of a socket" 1A -m "$M" --dir "$tmp/$(printf 'x%.0s' $(seq 100))"
run env B="$tmp/nowhere" scripts/pd-up 1P1D -m "$M"
check "no build: told which command is missing" eval '[ $got = 2 ] && told "pd-prefill is not there; build it first (make)"'
up --help
check "--help" eval '[ $got = 0 ] && grep -q "pd-up SET -m MODEL" "$tmp/out" && ! grep -q "set -u" "$tmp/out"'

# ---- a set with a command ----

up 2P1D1A -m "$M" --dir "$tmp/d" --prefill '--one two' --decode --three --workers '-t 3' --route '--four five' -- sh -c 'ls '"$tmp/d"'; echo "$PD_ROUTE"; cat; exit 7'
check "it exits with the command's status" [ $got = 7 ]
check "the command had all of them, and the router's name" \
    eval '[ "$(tr "\n" " " <"$tmp/out")" = "a0 a0.log a0.ready a0.trace d0 d0.log d0.ready d0.trace lock p0 p0.log p0.ready p0.trace p1 p1.log p1.ready p1.trace route route.log route.ready route.trace $tmp/d/route " ]'
check "it says when they are ready" told "ready: p0 p1 d0 a0 route in $tmp/d; the router is unix:$tmp/d/route"
check "each got its options" eval '
    grep -qF "pd-prefill: -m $M -t 3 --one two --listen unix:$tmp/d/p1 --trace $tmp/d/p1.trace --ready-fd 3" "$tmp/d/p1.log" &&
    grep -qF "pd-decode: -m $M --role decode -t 3 --three --listen unix:$tmp/d/d0" "$tmp/d/d0.log" && grep -qF -- "--role both -t 3 --three" "$tmp/d/a0.log" &&
    grep -qF "pd-route: --worker unix:$tmp/d/p0 --worker unix:$tmp/d/p1 --worker unix:$tmp/d/d0 --worker unix:$tmp/d/a0 --four five --listen unix:$tmp/d/route" "$tmp/d/route.log"'
check "all were drained, and nobody else has its lock" eval '[ "$(grep -l drained "$tmp"/d/*.log | wc -l)" = 5 ] && ! grep -q "has the lock" "$tmp"/d/*.log'
check "logs and traces stay, and nothing else" [ "$(left)" = "a0.log a0.trace d0.log d0.trace p0.log p0.trace p1.log p1.trace route.log route.trace " ]
check "nothing runs on" gone
printf 'through\n' >"$tmp/in"
env B="$tmp" scripts/pd-up 1A -m "$M" --dir "$tmp/d" -- cat <"$tmp/in" >"$tmp/out" 2>"$tmp/err"; got=$?
check "the command reads what pd-up was given; an earlier set's files are gone" eval '[ $got = 0 ] && [ "$(cat "$tmp/out")" = through ] && [ "$(left)" = "a0.log a0.trace route.log route.trace " ]'
up 1D3B -m "$M" --dir "$tmp/d" --both --six -- true
check "B: workers of role both, whose sides take turns" eval '[ $got = 0 ] && grep -qF -- "--role both --prefer decode -t 1 --six --listen unix:$tmp/d/b0" "$tmp/d/b0.log" &&
    grep -qF -- "--prefer prefill" "$tmp/d/b1.log" && grep -qF -- "--prefer decode" "$tmp/d/b2.log" && grep -qF -- "--worker unix:$tmp/d/d0 --worker unix:$tmp/d/b0 --worker unix:$tmp/d/b1" "$tmp/d/route.log"'
up 1A -m "$M" --dir "$tmp/d" -- true
threads=$(sed -n 's/.* -t \([0-9]*\) .*/\1/p' "$tmp/d/a0.log")
check "without -t the cores are shared out" eval '[ "$threads" -ge 1 ] && [ "$threads" -le "$(nproc)" ]'
TMPDIR=$tmp up 1P1D -m "$M" -- true
check "without --dir: a folder of its own, gone afterwards" eval '[ $got = 0 ] && [ -z "$(ls -d "$tmp"/pd-up.* 2>/dev/null)" ]'
TMPDIR=$tmp up 1P1D -m "$M" -- false
check "which stays when something failed" eval '[ $got = 1 ] && told "its logs and traces are in $tmp/pd-up." && [ -s "$(ls "$tmp"/pd-up.*/d0.log)" ]'

# ---- what goes wrong ----

up 1P1D -m "$M" --dir "$tmp/d" --decode --fail -- echo ran
check "a daemon that cannot start: status 1, which one and its last words" eval '[ $got = 1 ] && told "d0 ended with status 5; the set is taken down" && told "d0: pd-decode: this cannot work" && [ ! -s "$tmp/out" ]'
check "and nothing runs on" gone
up 1P1D -m "$M" --dir "$tmp/d" --prefill --never --ready-timeout 1 -- echo ran
check "one that is never ready" eval '[ $got = 1 ] && told "p0 is not ready after 1 s" && gone'
echo "workers_ready 1" >"$tmp/d/seen"
up 1P1D -m "$M" --dir "$tmp/d" --ready-timeout 1 -- echo ran
check "a router that does not see them all" eval '[ $got = 1 ] && told "the router sees 1 of 2 workers after 1 s" && gone && [ ! -s "$tmp/out" ]'
rm "$tmp/d/seen"
up 1P1D -m "$M" --dir "$tmp/d" --decode --later -- sh -c 'sleep 61.1357; echo survived'
check "one that dies later: its signal is told, the command ends too" eval '[ $got = 1 ] && told "d0 was ended by signal 11" && gone && ! pgrep -f "^sleep 61.1357" >/dev/null && [ ! -s "$tmp/out" ]'
up 1P1D -m "$M" --dir "$tmp/d" --decode '--status 3' -- true
check "one that does not end well: status 1 though the command succeeded" eval '[ $got = 1 ] && told "d0 ended with status 3" && gone'
up 1P1D -m "$M" --dir "$tmp/d" --route --stubborn --grace 1 -- true
check "one that does not drain is killed" eval '[ $got = 1 ] && told "route has not drained within 1 s and is killed" && gone'
up 1P1D -m "$M" --dir "$tmp/d" -- "$tmp/none"
check "a command that is not there: its shell's status" eval '[ $got = 127 ] && gone'
up 1P1D -m "$M" --dir "$tmp/d" -- sh -c 'sleep 62.1357 & exit 0'
check "what a command leaves in the background goes with the set" eval '[ $got = 0 ] && gone && ! pgrep -f "^sleep 62.1357" >/dev/null'

# ---- signals ----

begin() { rm -f "$tmp/err"; env B="$tmp" scripts/pd-up "$@" >"$tmp/out" 2>"$tmp/err" </dev/null & pid=$!; for _ in $(seq 200); do told "ready: " && return; sleep 0.05; done; }
end() { kill "-$1" $pid; wait $pid; got=$?; }
set -m          # so that INT is not ignored in what is started here
begin 1P1D -m "$M" --dir "$tmp/d"; sleep 0.3; end INT
check "Ctrl-C takes it down: status 0" eval '[ $got = 0 ] && gone'
check "logs were shown, each line with its name, to the end" eval 'grep -q "^d0: pd-decode: -m" "$tmp/out" && grep -q "^route: pd-route: drained" "$tmp/out" && grep -q "^p0: pd-prefill: drained" "$tmp/out"'
check "the daemons did not hear of it themselves" eval '! grep -q interrupted "$tmp"/d/*.log'
begin 1P1D -m "$M" --dir "$tmp/d" -- sleep 63.1357; end INT
check "Ctrl-C while a command runs: status 130" eval '[ $got = 130 ] && gone'
begin 1P1D -m "$M" --dir "$tmp/d" -- sleep 63.1357; end TERM
check "SIGTERM: status 143" eval '[ $got = 143 ] && gone'
begin 1P1D -m "$M" --dir "$tmp/d" --route --stubborn; kill -INT $pid; sleep 0.5; end INT
check "a second Ctrl-C does not wait" eval '[ $got = 0 ] && gone'
begin 1P1D -m "$M" --dir "$tmp/d" -- sleep 63.1357; end KILL
check "killed itself: the daemons and the command end" eval 'gone && ! pgrep -f "^sleep 63.1357" >/dev/null'
begin 1P1D -m "$M" --dir "$tmp/d"
mv "$tmp/err" "$tmp/err1"
up 1A -m "$M" --dir "$tmp/d"
check "a second set in one folder is refused" eval '[ $got = 2 ] && told "another pd-up has its set in $tmp/d"'
end TERM
up 1A -m "$M" --dir "$tmp/d" -- true
check "and possible after the first has ended" eval '[ $got = 0 ] && gone'
echo "1..$n"
exit $rc
