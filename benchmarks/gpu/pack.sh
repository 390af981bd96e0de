#!/usr/bin/env bash
# Pack what a GPU machine needs into one folder, which may be carried anywhere: the committed tree, and what wheels.sh downloaded.
#
#   bash benchmarks/gpu/pack.sh TARGET [--without-minilm]
#   bash TARGET/all.sh [OPTION ...]      # there: unpacks the tree and runs the suite; PYTHON names the interpreter
set -euo pipefail
target=${1:?usage: pack.sh TARGET [--without-minilm]}
mkdir -p "$target"
target=$(cd "$target" && pwd)
[ -z "$(ls -A "$target")" ] || { echo "$target is not empty. Give an empty folder." >&2; exit 2; }
cd "$(dirname "$0")/../.."
git archive --format=tar.gz --output="$target/tree.tar.gz" HEAD
names=(wheels reviews.tar.xz minilm.tar.xz)
[ "${2:-}" != --without-minilm ] || names=(wheels reviews.tar.xz)
for name in "${names[@]}"; do
  if [ -e "benchmarks/gpu/$name" ]; then cp -r "benchmarks/gpu/$name" "$target/"; else echo "benchmarks/gpu/$name: missing; see wheels.sh" >&2; fi
done
cat >"$target/all.sh" <<'END'
#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
if [ ! -e tree ]; then
  rm -rf tree.part
  mkdir tree.part
  tar -xzf tree.tar.gz -C tree.part
  for name in wheels reviews.tar.xz minilm.tar.xz; do
    if [ -e "$name" ]; then mv "$name" tree.part/benchmarks/gpu/; fi
  done
  mv tree.part tree
fi
exec bash tree/benchmarks/gpu/all.sh "$@"
END
du -cm "$target"/* | tail -1 | awk '{print "Packed: " $1 " MiB."}'
