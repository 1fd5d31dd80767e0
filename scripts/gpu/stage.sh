#!/usr/bin/env bash
# One stage of what is to be shown on a GPU machine, each under 8 minutes from a bare start (SGLang 0.5.17 installed, or
# `source scripts/gpu/setup.sh PACK` before; FlashInfer compiles for 2 minutes when its cache is empty).
#
#   smoke   kernels against their references, artifacts between processes, the self-check in bf16 (CHECKS, by default P1,P4), the gates
#           of models/almanac
#   families  the self-check in bf16 on a tiny model of each kind of layers, several at a time (CHECKS; FAMILIES, names of tiny models;
#           JOBS at once); MODEL_DIR may be anything
#   ttft    hypic beside stock SGLang: cold, prefix hit, warm, turn, several at once; kernels; hypic once more with T in bfloat16
#   speed   the same without several at once and bfloat16, under the flags that MODEL_DIR's family needs (docs/BENCHMARKS.md, Families);
#           ATTENTION and PREFILL_GRAPH override the attention backend and how prefills are captured
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
# DEVICE=cpu tries families and speed on a CPU, the latter with a tiny model and short prompts.
set -uo pipefail
stage=$1 model=$2 out=$3
shift 3
mkdir -p "$out"
gpu=1
[ "${DEVICE:-cuda}" = cpu ] && gpu=0
shape=(--load-format dummy --skip-tokenizer-init --dtype bfloat16 --sampling-backend pytorch --grammar-backend none
  --max-running-requests 16 --random-seed 1)
if [ $gpu = 1 ]; then
  shape+=(--mem-fraction-static 0.8 --cuda-graph-max-bs-decode 16 --cuda-graph-max-bs-prefill 2048 --disable-flashinfer-autotune
    --max-prefill-tokens 65536)
else
  shape+=(--device cpu)
fi
# Line by line, so that what a time limit cuts off has been seen and written up to there.
quiet() { stdbuf -oL tr '\r' '\n' | grep --line-buffered -v -e Capturing -e '^$' -e Warning -e warnings.warn; }
bench() { python3 -m hypic bench "$model" "${shape[@]}" --no-selfcheck "${more[@]}" "$@" 2>&1 | quiet; }
# Which attention kernels SGLang 0.5.17 serves a family with on a GPU, of those that hypic is proven with. Its Triton backend wants
# layer 0 to be full attention in Mamba2 hybrids (Nemotron-H it refuses at once, Granite-4-H dies); latent attention is Triton's.
# Experts of Nemotron-H would be FlashInfer's by default, which compile for minutes on a bare machine.
family_flags() { # MODEL_TYPE
  local prefill=${PREFILL_GRAPH:-breakable}
  case $1 in
    kimi_linear | deepseek* | bailing_hybrid) attention=triton prefill=${PREFILL_GRAPH:-disabled} ;;
    nemotron_h | granitemoehybrid) attention=flashinfer prefill=${PREFILL_GRAPH:-disabled} ;;
    *) attention=flashinfer ;;
  esac
  flags=(--attention-backend "${ATTENTION:-$attention}" --cuda-graph-backend-prefill "$prefill")
  [ "$1" = nemotron_h ] && flags+=(--moe-runner-backend triton)
  [ $gpu = 1 ] || flags=()
}
model_type() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1] + "/config.json"))["model_type"])' "$1"; }
flashinfer=(--attention-backend flashinfer --cuda-graph-backend-prefill breakable)
case $stage in
  smoke | families) export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} ;; # oracles: small products on the CPU, of several processes at once
esac
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
  families)
    # Each engine sees the others' memory come and go while it counts what is free: a third of the GPU as its own is more than enough.
    small=(--dtype bfloat16 --sampling-backend pytorch --grammar-backend none --max-total-tokens 60000 --context-length 8192
      --max-running-requests 16 --max-mamba-cache-size 128 --hypic-memory 1GiB)
    if [ $gpu = 1 ]; then
      small+=(--mem-fraction-static 0.3 --cuda-graph-max-bs-decode 8 --disable-flashinfer-autotune)
    else
      small+=(--device cpu)
    fi
    family() { # NAME: its log is what the engines printed, its .txt what was found
      local dir
      dir=$(python3 -c "from hypic.check.tiny_models import build; print(build('$1'))" 2> /dev/null)
      PREFILL_GRAPH=${PREFILL_GRAPH:-disabled} family_flags "$(model_type "$dir")"
      timeout -k 10 "${BUDGET:-420}" python3 -m hypic selfcheck "$dir" --checks "${CHECKS:-P1,P4}" --log "$out/$1.log" \
        "${small[@]}" "${flags[@]}" "${extra[@]}" > "$out/$1.txt" 2>&1
      echo "$1: exit code $?" | tee -a "$out/$1.txt"
    }
    extra=("$@")
    for name in ${FAMILIES:-qwen35 kimi_dense nemotronh_dense ringlinear falconh1 deepseekv2 ring25}; do
      while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-$((gpu ? 8 : 1))}" ]; do wait -n; done
      family "$name" &
    done
    wait
    grep -h -e '^passed ' -e '^failed ' -e '^skipped ' -e 'exit code' -e '^│' "$out"/*.txt
    ;;
  ttft)
    shape+=("${flashinfer[@]}" "$@" --hypic-memory 24GiB)
    more=(--suites kernels,ttft,concurrency --together 1,2,4 --reps 9 --context-length 65536 --out "$out")
    bench | tee "$out/bench.log"
    more=(--suites kernels,ttft --engines hypic --hypic-state-dtype bfloat16 --context-length 65536 --out "$out/bfloat16")
    bench | tee "$out/bfloat16.log"
    ;;
  speed)
    family_flags "$(model_type "$model")"
    shape+=("${flags[@]}" "$@")
    more=(--suites kernels,ttft --reps "${REPS:-5}" --context-length 65536 --hypic-memory 6GiB --out "$out")
    [ $gpu = 1 ] || more=(--suites kernels,ttft --reps 1 --segments 3 --segment-tokens 100 --system 8 --query 8
      --context-length 8192 --hypic-memory 64MiB --out "$out")
    bench | tee "$out/bench.log"
    python3 -m hypic.bench.families "$out/bench.json"
    ;;
  scale)
    shape+=("${flashinfer[@]}" "$@" --hypic-memory 24GiB)
    more=(--suites scale --engines hypic --counts 4,16,64,100,128 --lengths 512,2048,8192,16384 --context-length 262144
      --out "$out")
    bench | tee "$out/scale.log"
    ;;
  scatter)
    workers=${WORKERS:-1,2}
    python3 -m hypic.router.transport.measure --device cuda --mib 160 --reps 9 | tee "$out/transfers.json"
    shape+=("${flashinfer[@]}" "$@" --hypic-memory 24GiB)
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
    python3 -m hypic replay "$model" "${shape[@]}" "${flashinfer[@]}" "$@" --generate "${SPEC:-traces/rag-production.toml}" --resume \
      --out "$out" --engines "${ENGINES:-hypic,prefix,none}" --find-qps --slo-ttft 1.0 --start-qps 2 --tolerance 0.15 --warmup 60 \
      --requests 300 --seconds 30 --budget "${BUDGET:-450}" --no-selfcheck --hypic-memory 24GiB --context-length 40960 \
      --max-running-requests 64 --cuda-graph-max-bs-decode 64 2>&1 | quiet | tee -a "$out/replay.log"
    ;;
  *)
    echo "no stage $stage: smoke, families, ttft, speed, scale, scatter, memory or replay" >&2
    exit 2
    ;;
esac
