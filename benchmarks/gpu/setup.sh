#!/usr/bin/env bash
# Run on the GPU machine, which has no network: installs the wheels, unpacks the data, and prints the PYTHONPATH that the commands need.
#
#   export PYTHONPATH=$(bash benchmarks/gpu/setup.sh)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=$PWD/build/gpu-site-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$site"
if compgen -G 'benchmarks/gpu/wheels/*.whl' >/dev/null && [ "$(ls benchmarks/gpu/wheels)" != "$(cat "$site/wheels.txt" 2>/dev/null)" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    --upgrade --target "$site" benchmarks/gpu/wheels/*.whl >&2
  ls benchmarks/gpu/wheels >"$site/wheels.txt" # installed once, whatever the machine has of them already
fi
"$python" benchmarks/gpu/install.py "$site"
unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
for content in reviews minilm; do
  archive=benchmarks/gpu/$content.tar.xz part=benchmarks/gpu/$content.part
  if [ -e "$archive" ] && [ ! -e "benchmarks/gpu/data/$content" ]; then
    rm -rf "$part"
    mkdir -p benchmarks/gpu/data
    if "$python" -c "$unpack" "$archive" "$part"; then
      mv "$part/$content" "benchmarks/gpu/data/$content"
    else
      echo "$archive cannot be unpacked: the suite runs without $content" >&2
    fi
    rm -rf "$part"
  fi
done
packages=$(printf '%s:' "$PWD"/packages/*/src)
echo "$site:$PWD/core:$PWD/plugins:$PWD/benchmarks:${packages%:}${PYTHONPATH:+:$PYTHONPATH}"
