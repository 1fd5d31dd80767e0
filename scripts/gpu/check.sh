#!/usr/bin/env bash
# On a GPU machine with SGLang 0.5.17: kernels on the GPU, then all suites of `hypic bench` beside stock SGLang.
# Usage: scripts/gpu/check.sh MODEL_DIR OUT_DIR [extra SGLang flags]
# MODEL_DIR holds a config.json; weights are random (--load-format dummy).
set -uo pipefail
model=$1 out=$2
shift 2
mkdir -p "$out"
python3 -m pytest -q tests/kernels tests/algebra 2>&1 | tee "$out/kernels.log" | tail -15
python3 -m hypic bench "$model" --suites ttft,concurrency,scale --together 1,4 --counts 4,16,64,100 --lengths 512,2048 \
  --hypic-memory 24GiB --out "$out" --load-format dummy --skip-tokenizer-init --dtype bfloat16 \
  --attention-backend flashinfer --sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.8 \
  --context-length 262144 --max-running-requests 16 --cuda-graph-max-bs-decode 8 --cuda-graph-max-bs-prefill 2048 \
  --cuda-graph-backend-prefill breakable --disable-flashinfer-autotune --random-seed 1 --max-prefill-tokens 65536 "$@" \
  2>&1 | tr '\r' '\n' | grep -v Capturing | tee "$out/bench.log"
