#!/usr/bin/env bash
# The GPU suite: all.sh [tests|ablation|job|lm|peers|plugin-tests ...] [--tiny] [OPTION ...]. Without names all commands run, in order of value.
# Options go to the commands as they are. --tiny tests the suite itself: a tiny model and few steps, on any machine.
set -uo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
names=() rest=()
for argument in "$@"; do
  case $argument in
    tests | ablation | job | lm | peers | plugin-tests) names+=("$argument") ;;
    --tiny) rest+=("$argument") && export OMP_NUM_THREADS=1 ;; # threads that wait for each other lose most on a busy machine
    *) rest+=("$argument") ;;
  esac
done
[ ${#names[@]} -gt 0 ] || names=(tests ablation job lm peers plugin-tests)
PYTHONPATH=$(bash "$folder/setup.sh") || exit
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0
for name in "${names[@]}"; do
  echo "== $name"
  case $name in
    plugin-tests) "$python" "$folder/tests.py" --plugins ${rest[@]+"${rest[@]}"} || failed=1 ;;
    *) "$python" "$folder/$name.py" ${rest[@]+"${rest[@]}"} || failed=1 ;;
  esac
done
exit $failed
