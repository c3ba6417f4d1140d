#!/usr/bin/env bash
# A whole run on this machine: stack, starting policy, training, report. `scripts/demo.sh [tiny|smollm2] [SEED]`.
# A second call uses what is there and starts a run of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${1:-tiny}
seed=${2:-0}
case $model in
  tiny) policy=tiny example=examples/runs/shell.json ;;
  smollm2) policy=smollm2-shell example=examples/runs/smollm2.json ;;
  *) echo "MODEL is tiny or smollm2, not $model" >&2; exit 2 ;;
esac

ratchet=.venv/bin/ratchet
"$ratchet" up
eval "$("$ratchet" env)"
"$ratchet" bootstrap "$policy"

run="demo-$model-$(date -u +%Y%m%d-%H%M%S)"
input="$RATCHET_HOME/runs/$run.json"
.venv/bin/python scripts/run_input.py "$example" --set "model=$policy" --set "seed=$seed" >"$input"

start=(temporal workflow start --address "$TEMPORAL_ADDRESS" --task-queue control --type TrainingRun
  --workflow-id "$run" --input-file "$input")
printf '\n$ %s\n' "${start[*]}"
"${start[@]}"

echo
code=0
"$ratchet" watch "$run" || code=$?
echo
"$ratchet" report "$run" || code=$?
echo
echo "Temporal UI: $RATCHET_TEMPORAL_UI/namespaces/$TEMPORAL_NAMESPACE/workflows/$run"
echo "the stack stays up; \`make down\` stops it"
exit "$code"
