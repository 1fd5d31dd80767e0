#!/usr/bin/env bash
# All that a node of several GPUs has to show, in one command that ends within BUDGET seconds (560) and needs no network: cold prompts
# of 32k and 100k tokens on 1, 2, 4, ... WORKERS workers of a cluster, equal and uneven, LPT and round robin, beside the simulation and
# the bounds; whether several workers answer as one; transfers; a trace's highest rate under an SLO of 1 s TTFT on the cluster and on
# as many stock servers; stock cold on one GPU and with TP over all; P3 and P4 of a tiny model across all workers. OUT_DIR gets
# summary.md, scatter.png, replay.png and JSON.
# SGLang 0.5.17 is installed, or `source scripts/gpu/setup.sh PACK` was called before.
#
# Usage: scripts/gpu/node.sh MODEL_DIR OUT_DIR [WORKERS] [more flags of SGLang or of python -m hypic.bench.node]
#   such as --stages cluster (of transfers,cluster,stock,tp,answers), --stagger (one weight load at a time), --reps 3
# MODEL_DIR holds a config.json of the shape to time; its weights are random (--load-format dummy), and are made on the GPUs.
# DEVICE=cpu tries all of it on a CPU with a small model and short prompts (docs/BENCHMARKS.md).
set -uo pipefail
model=$1 out=$2 workers=${3:-8}
shift $(($# < 3 ? $# : 3))
budget=${BUDGET:-560}
mkdir -p "$out"
# No NVLink multicast, whatever starts: it can put the GPUs of a host that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# What the driver says of access between GPUs is believed: SGLang's own trial of it for TP starts two interpreters for each pair.
export SGLANG_SKIP_P2P_CHECK=1
flags=(--load-format dummy --skip-tokenizer-init --random-seed 1 --stream-interval 8)
if [ "${DEVICE:-cuda}" = cpu ]; then
  flags+=(--device cpu --context-length 8192 --segments 4,6 --segment-tokens 200 --reps 1 --spec traces/tiny.toml --warmup 8
    --requests 10 --slo-ttft 20 --max-lag 20 --hypic-memory 64MiB)
else
  flags+=(--dtype bfloat16 --attention-backend flashinfer --sampling-backend pytorch --grammar-backend none
    --mem-fraction-static 0.75 --max-running-requests 64 --cuda-graph-max-bs-decode 64 --cuda-graph-max-bs-prefill 2048
    --cuda-graph-backend-prefill breakable --disable-flashinfer-autotune --max-prefill-tokens 65536 --context-length 131072
    --hypic-memory 24GiB)
fi
timeout -k 60 $((budget + 40)) python3 -m hypic.bench.node "$model" --out "$out" --workers "$workers" --budget "$budget" \
  "${flags[@]}" "$@" 2>&1 | tee "$out/node.log"
