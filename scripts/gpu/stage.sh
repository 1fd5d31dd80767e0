#!/usr/bin/env bash
# One stage of what is to be shown on a GPU machine, each under 8 minutes from a bare start (SGLang 0.5.17 installed, or
# `source scripts/gpu/setup.sh PACK` before; FlashInfer compiles for 2 minutes when its cache is empty).
#
#   smoke   kernels against their references, artifacts between processes, the self-check in bf16 (CHECKS, by default P1,P4), the gates
#           of models/almanac
#   ttft    hypic beside stock SGLang: cold, prefix hit, warm, turn, several at once; kernels; once more with states in float32
#   scale   warm links of 4 to 128 segments of 512 to 16,384 tokens
#   scatter cold prompts on 1 to N workers behind a router, one GPU each: 32k and 100k, equal and uneven, LPT and round robin, and stock
#           SGLang on one GPU and with TP=N; before that, artifacts between the GPUs alone (WORKERS, by default 1,2; TP, by default 2)
#   memory  what hypic doctor plans beside what the server has, by default memory flags: on the whole GPU, and as if it had 80 GB (a process
#           holds the rest) with the same flags and with --mem-fraction-static 0.92; each answers a linked prompt of 32k tokens (CASES, by
#           default whole,80gb,80gb-raised)
#   replay  the highest rate of a RAG trace under an SLO of 1 s TTFT
#
# Usage: scripts/gpu/stage.sh STAGE MODEL_DIR OUT_DIR [extra SGLang flags]
# MODEL_DIR holds a config.json of the shape to time; its weights are random (--load-format dummy).
set -uo pipefail
stage=$1 model=$2 out=$3
shift 3
mkdir -p "$out"
shape=(--load-format dummy --skip-tokenizer-init --dtype bfloat16 --attention-backend flashinfer --sampling-backend pytorch
  --grammar-backend none --mem-fraction-static 0.8 --max-running-requests 16 --cuda-graph-max-bs-decode 16
  --cuda-graph-max-bs-prefill 2048 --cuda-graph-backend-prefill breakable --disable-flashinfer-autotune --random-seed 1
  --max-prefill-tokens 65536 "$@")
# Line by line, so that what a time limit cuts off has been seen and written up to there.
quiet() { stdbuf -oL tr '\r' '\n' | grep --line-buffered -v -e Capturing -e '^$' -e Warning -e warnings.warn; }
bench() { python3 -m hypic bench "$model" "${shape[@]}" --no-selfcheck --hypic-memory 24GiB "${more[@]}" "$@" 2>&1 | quiet; }
case $stage in
  smoke)
    small=(--dtype bfloat16 --attention-backend flashinfer --sampling-backend pytorch --grammar-backend none
      --mem-fraction-static 0.15 --max-total-tokens 60000 --context-length 8192 --max-running-requests 16
      --cuda-graph-max-bs-decode 8 --cuda-graph-max-bs-prefill 512 --cuda-graph-backend-prefill breakable
      --disable-flashinfer-autotune)
    python3 -m pytest -q tests/kernels tests/worker/test_measure.py 2>&1 | tee "$out/kernels.log" | tail -4 &
    python3 -m models.gates models/almanac --out "$out/gates.json" --sequences 28 2>&1 | tee "$out/gates.log" | tail -60 &
    tiny=$(python3 -c "from hypic.check.tiny_models import build; print(build('qwen35'))")
    python3 -m hypic selfcheck "$tiny" --checks "${CHECKS:-P1,P4}" "${small[@]}" 2>&1 | quiet | tee "$out/selfcheck.log" | tail -12 &
    wait
    ;;
  ttft)
    more=(--suites kernels,ttft,concurrency --together 1,2,4 --reps 9 --context-length 65536 --out "$out")
    bench | tee "$out/bench.log"
    more=(--suites kernels,ttft --engines hypic --hypic-state-dtype float32 --context-length 65536 --out "$out/float32")
    bench | tee "$out/float32.log"
    ;;
  scale)
    more=(--suites scale --engines hypic --counts 4,16,64,100,128 --lengths 512,2048,8192,16384 --context-length 262144
      --out "$out")
    bench | tee "$out/scale.log"
    ;;
  scatter)
    workers=${WORKERS:-1,2}
    python3 -m hypic.router.transport.measure --device cuda --mib 160 --reps 9 | tee "$out/transfers.json"
    more=(--suites scatter --workers "$workers" --scatter-segments 16,50 --tp-alternative "${TP:-2}" --reps "${REPS:-7}"
      --context-length 131072 --budget "${BUDGET:-440}" --out "$out")
    bench | tee "$out/scatter.log"
    ;;
  memory)
    python3 -m hypic.bench.memory "$model" --out "$out" --cases "${CASES:-whole,80gb,80gb-raised}" --load-format dummy \
      --skip-tokenizer-init --dtype bfloat16 --attention-backend flashinfer --sampling-backend pytorch --grammar-backend none \
      --cuda-graph-backend-prefill breakable --disable-flashinfer-autotune --random-seed 1 "$@" 2>&1 | quiet | tee "$out/memory.log"
    ;;
  replay)
    # One engine in a call: ENGINES=hypic, then prefix, then none; the second and third go on in OUT_DIR.
    python3 -m hypic replay "$model" "${shape[@]}" --generate "${SPEC:-traces/rag-production.toml}" --resume --out "$out" \
      --engines "${ENGINES:-hypic,prefix,none}" --find-qps --slo-ttft 1.0 --start-qps 2 --tolerance 0.15 --warmup 60 \
      --requests 300 --seconds 30 --budget "${BUDGET:-450}" --no-selfcheck --hypic-memory 24GiB --context-length 40960 \
      --max-running-requests 64 --cuda-graph-max-bs-decode 64 2>&1 | quiet | tee -a "$out/replay.log"
    ;;
  *)
    echo "no stage $stage: smoke, ttft, scale, scatter, memory or replay" >&2
    exit 2
    ;;
esac
