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
if [ -e benchmarks/gpu/data.tar.xz ] && [ ! -e benchmarks/gpu/data/reviews.npz ]; then
  rm -rf benchmarks/gpu/data benchmarks/gpu/data.part
  unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
  if "$python" -c "$unpack" benchmarks/gpu/data.tar.xz benchmarks/gpu/data.part; then
    mv benchmarks/gpu/data.part benchmarks/gpu/data
  else
    echo "benchmarks/gpu/data.tar.xz cannot be unpacked: reviews will be generated" >&2
  fi
fi
echo "$site:$PWD/core:$PWD/plugins:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
