#!/usr/bin/env bash
# Makes OUT/site.tar.xz: stock SGLang 0.5.17 and what a machine with Python 3.12 and torch 2.11 (CUDA 13) lacks for it. About
# 40 MB, 3 minutes; needs a package index. For GPU machines that reach none.
# Usage: scripts/gpu/pack.sh OUT
set -euo pipefail
out=$(realpath -m "$1")
site=$out/site
platforms=()
for glibc in 34 31 28 27 26 24 17 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
fetch() { # FOLDER REQUIREMENT...
  local to=$1
  shift
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$to" "$@"
}
rm -rf "$site"
mkdir -p "$site" "$out/wheels" "$out/kernels"
fetch "$out/wheels" -r "$(dirname "$0")/site.txt"
fetch "$out/kernels" sglang-kernel==0.4.5
# Its index has no wheel of it, only its source.
python3 -m pip wheel -q --no-deps -w "$out/wheels" rouge-score==0.1.2
cd "$site"
for wheel in "$out"/wheels/*.whl; do unzip -q -o "$wheel"; done
# Of the kernels only what Hopper loads at import: FA3 alone is 1.1 GB.
unzip -q -o "$out"/kernels/sglang_kernel-0.4.5*.whl \
  -x 'sgl_kernel/flash_ops*' 'sgl_kernel/flashmla_ops*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/sm100/*'
rm -rf sglang/multimodal_gen sglang/test sglang/srt/server/_core*.so sglang/srt/grpc/_core*.so xgrammar/lib bin tools ./*.data \
  flashinfer/data/cutlass/{python,test,examples} flashinfer/data/cccl/python tvm_ffi/3rdparty
find . -name '*.so*' -size +300k ! -path './sgl_kernel/*' -exec strip --strip-unneeded {} \;
# SGLang imports these two and never calls them when it serves text.
mkdir -p IPython soundfile
printf 'version_info = (9, 0)\ndef get_ipython(): return None\n' > IPython/__init__.py
printf 'def HTML(x=None, *a, **k): return x\ndef display(*a, **k): return None\n' > IPython/display.py
printf 'def __getattr__(n):\n    raise AttributeError(n) if n.startswith("__") else ImportError("soundfile is a stub here")\n' \
  > soundfile/__init__.py
find . -name __pycache__ -type d -prune -exec rm -rf {} +
tar c -C "$site" . | xz -T0 -6 > "$out/site.tar.xz"
ls -l "$out/site.tar.xz"
