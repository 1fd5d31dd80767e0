# Source this on a GPU machine from the repository's root: unpacks PACK/site.tar.xz (scripts/gpu/pack.sh) once into /tmp/site, and
# puts the JIT caches that scripts/gpu/collect.sh once packed where kernels look for them, which saves minutes.
# Usage: source scripts/gpu/setup.sh [PACK]
pack=${1:-}
if [ -n "$pack" ] && [ ! -d /tmp/site ]; then
  mkdir -p /tmp/site && tar xJf "$pack/site.tar.xz" -C /tmp/site
fi
mkdir -p /tmp/cache
if [ -n "$pack" ] && [ -f "$pack/cache.tar.xz" ] && [ ! -f /tmp/cache/.done ]; then
  tar xJf "$pack/cache.tar.xz" -C /tmp/cache && touch /tmp/cache/.done
fi
export TRITON_CACHE_DIR=/tmp/cache/triton TVM_FFI_CACHE_DIR=/tmp/cache/tvm-ffi FLASHINFER_WORKSPACE_BASE=/tmp/cache/flashinfer
export TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor SGLANG_CACHE_DIR=/tmp/cache/sglang HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/tmp/site:$PWD
