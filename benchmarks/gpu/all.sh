#!/usr/bin/env bash
# The GPU suite: all.sh [plan|tests|ablation|job|lm|peers|plugin-tests ...] [--tiny] [OPTION ...]. Without names it is the plan.
# Options go to the commands as they are. --tiny tests the suite itself: a tiny model and few steps, on any machine.
set -uo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
names=() rest=()
for argument in "$@"; do
  case $argument in
    plan | tests | ablation | job | lm | peers | plugin-tests)
      # after --start it names a part of the plan
      if [ ${#rest[@]} -gt 0 ] && [ "${rest[-1]}" = --start ]; then rest+=("$argument"); else names+=("$argument"); fi ;;
    --tiny) rest+=("$argument") && export OMP_NUM_THREADS=1 ;; # threads that wait for each other lose most on a busy machine
    *) rest+=("$argument") ;;
  esac
done
[ ${#names[@]} -gt 0 ] || names=(plan)
PYTHONPATH=$(bash "$folder/setup.sh") || exit
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0
for name in "${names[@]}"; do
  echo "== $name"
  case $name in
    plan) "$python" "$folder/plan.py" --used "$SECONDS" ${rest[@]+"${rest[@]}"} || failed=1 ;; # SECONDS: since this script began
    plugin-tests) "$python" "$folder/tests.py" --plugins ${rest[@]+"${rest[@]}"} || failed=1 ;;
    *) "$python" "$folder/$name.py" ${rest[@]+"${rest[@]}"} || failed=1 ;;
  esac
done
exit $failed
