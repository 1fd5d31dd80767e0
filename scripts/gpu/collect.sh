#!/usr/bin/env bash
# Packs the JIT caches of this machine into OUT/cache.tar.xz, for scripts/gpu/setup.sh on the next one of the same kind.
# Usage: scripts/gpu/collect.sh OUT
set -euo pipefail
out=$(realpath -m "$1")
mkdir -p "$out"
tar c -C /tmp/cache --exclude .done . | xz -T0 -5 > "$out/cache.tar.xz"
ls -l "$out/cache.tar.xz"
