# run.sh: runs one command for the host where sbxd can't be built, and keeps its result as sbxd would.
#
# `docker exec` starts it as root; the key's claim is a file made atomically, so a key runs at most once, and the result
# appears whole or not at all. It speaks with nobody: the host reads the result's file, after a lost client too. Weaker
# than sbxd in three points: output ends at 64 MiB (the writer gets SIGXFSZ), a status above 128 is read as a signal, and a
# time-out also kills what earlier commands of the agent left running. Called by activities/sandbox/exec_channel.py.
#
#   sh run.sh <key> <uid> <timeout s> <half of the cap> <cwd> <shell> <command>
key=$1 uid=$2 timeout=$3 half=$4 cwd=$5 shell=$6 command=$7
tools=/run/ratchet/tools/bin
box=/run/ratchet/box
umask 022

counter() { # <name or -> <file>...: a value of the first file that is there
    name=$1
    shift
    for file in "$@"; do
        [ -r "$file" ] || continue
        while read -r first second; do
            [ "$name" = - ] && value=$first && break
            [ "$first" = "$name" ] && value=$second && break
        done <"$file"
        [ "$value" = max ] && value=-1
        return 0
    done
    value=-1
}
cg=/sys/fs/cgroup
oom() { value=0 && counter oom_kill $cg/memory.events $cg/memory/memory.oom_control; }
hits() { value=0 && counter max $cg/pids.events $cg/pids/pids.events; }
held() {
    value=0 && counter - $cg/pids.current $cg/pids/pids.current && pids=$value
    value=0 && counter - $cg/pids.max $cg/pids/pids.max && most=$value
}
clock() { read -r up rest </proc/uptime && centis=${up%.*}${up#*.}; }

# The shell's own: a claim takes no process, for the agent's may leave no room for one.
set -C
echo 2>/dev/null >"$box/$key.claim" || exit 0
set +C
# Where the agent's processes leave no room for ours, this shell ends at its next fork: say so without one.
trap '[ -e "$box/$key" ] || { held && echo "-1 0 0 11 0 0 0 0 0 0 $pids $most -" >"$box/$key"; }' EXIT
oom && oom_before=$value
hits && hits_before=$value
cd "$cwd" 2>/dev/null || cd /
clock && started=$centis

# The watchdog stands before the command does, so a fork bomb can't keep it from starting.
"$tools/setsid" "$tools/sh" -c '
    "$1/sleep" "$2"
    : >"$3.timeout"
    read -r pid <"$3.pid"
    kill -TERM -- "-$pid"
    "$1/sleep" 0.5
    kill -KILL -- "-$pid"
    [ "$4" = 0 ] || exec "$1/su" -m -s /bin/sh agent -c "kill -9 -1"
' watchdog "$tools" "$timeout" "$box/$key" "$uid" >/dev/null 2>&1 </dev/null &
watchdog=$!

(
    ulimit -f 131072
    # The kernel shall take the command, not the sandbox's first process.
    echo 1000 >/proc/self/oom_score_adj
    [ "$uid" = 0 ] && exec "$tools/setsid" "$shell" -c "$command"
    exec "$tools/setsid" "$tools/su" -m -s "$shell" agent -c "$command"
) >"$box/$key.out" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$box/$key.pid"
wait "$pid"
code=$?
clock && ms=$(((centis - started) * 10))
timed_out=0 signal=0
if [ -e "$box/$key.timeout" ]; then
    timed_out=1
    wait "$watchdog"
else
    kill -KILL -- "-$watchdog" 2>/dev/null
fi
[ "$code" -gt 128 ] && signal=$((code - 128)) && code=-1

full=
for dir in /work /data /tmp; do
    set -- $("$tools/stat" -f -c '%a %d' "$dir" 2>/dev/null)
    [ "${1:-1}" = 0 ] || [ "${2:-1}" = 0 ] && full=${full:+$full,}$dir
done
total=$("$tools/stat" -c %s "$box/$key.out")
n_head=$((total < half ? total : half))
n_tail=$((total - n_head < half ? total - n_head : half))
oom && oom_now=$value
hits && hits_now=$value
held
{
    echo "$code $signal $timed_out 0 $ms $total $n_head $n_tail $((oom_now - oom_before)) $((hits_now - hits_before))" \
        "$pids $most ${full:--}"
    "$tools/head" -c "$n_head" "$box/$key.out"
    [ "$n_tail" = 0 ] || "$tools/tail" -c "$n_tail" "$box/$key.out"
} >"$box/$key.part"
"$tools/mv" "$box/$key.part" "$box/$key"
"$tools/rm" -f "$box/$key.out" "$box/$key.pid" "$box/$key.timeout"
