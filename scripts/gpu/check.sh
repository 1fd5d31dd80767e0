#!/usr/bin/env bash
# On a GPU machine with SGLang 0.5.17: kernels on the GPU, then TTFT of the Qwen3.5-35B-A3B shape beside stock SGLang.
# Usage: scripts/gpu/check.sh MODEL_DIR OUT_DIR [extra SGLang flags]
# MODEL_DIR holds a config.json; weights are random (--load-format dummy).
set -uo pipefail
model=$1 out=$2
shift 2
mkdir -p "$out"
python3 -m pytest -q -x tests/kernels tests/algebra 2>&1 | tee "$out/kernels.log" | tail -15
python3 -m hypic bench "$model" --segments 16 --segment-tokens 2048 --reps 5 --hypic-memory 12GiB --json \
  --load-format dummy --skip-tokenizer-init --dtype bfloat16 --attention-backend triton --sampling-backend pytorch \
  --grammar-backend none --mem-fraction-static 0.8 --context-length 65536 --max-running-requests 16 \
  --cuda-graph-backend-prefill disabled --cuda-graph-max-bs-decode 8 --disable-flashinfer-autotune --random-seed 1 \
  --chunked-prefill-size 65536 --max-prefill-tokens 65536 --log-level warning "$@" >"$out/bench.json" 2> >(tee "$out/bench.log" >&2)
cat "$out/bench.json"
