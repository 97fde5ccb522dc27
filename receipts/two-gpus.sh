#!/usr/bin/env bash
# Makes the receipts of one machine with two GPUs: one training in several layouts, and a larger model.
#   receipts/two-gpus.sh FOLDER [NAME ...]
# Without names all are made. Each measurement has LIMIT seconds and its own log; one that fails does not keep the others from running. SMALL=1 runs
# the same on tiny models, for trying this script on a machine without a GPU.
set -uo pipefail
folder=$1
shift
only=" $* "
limit=${LIMIT:-150}
mkdir -p "$folder"

small=("--model" "LiquidAI/LFM2-8B-A1B")
large=("--model" "openai/gpt-oss-20b")
shape=(--seq 4096 --batch 1 --warmup 3)
if [ -n "${SMALL:-}" ]; then
    small=(--model tiny --family lfm2)
    large=(--model tiny --family gpt_oss)
    shape=(--seq 32 --batch 1 --warmup 1)
fi

# measure NAME OPTIONS...
measure() {
    local name=$1 began=$SECONDS
    shift
    if [ "$only" != "  " ] && [ "${only/ $name /}" = "$only" ]; then return; fi
    echo "== $name"
    timeout --kill-after=10 "$limit" python3 -P -m halo_core.cli.main bench "$@" "${shape[@]}" --nproc 2 \
        dtype=bfloat16 optim=adamw_torch --out "$folder/$name.json" >"$folder/$name.log" 2>&1
    local code=$?
    tail -n 12 "$folder/$name.log"
    echo "== $name ended with $code after $((SECONDS - began)) s"
    if [ $code -eq 0 ]; then rm -f "$folder/$name.log"; fi
}

# 20 losses each: three steps to warm up, seventeen timed.
measure lfm2-8b-ep1 "${small[@]}" --steps 17
measure lfm2-8b-ep2-all-to-all "${small[@]}" --steps 17 expert_parallel_size=2 ep_dispatcher=all_to_all
measure lfm2-8b-ep2-deepep "${small[@]}" --steps 17 expert_parallel_size=2 ep_dispatcher=deepep
measure gpt-oss-20b-ep2-all-to-all "${large[@]}" --steps 5 expert_parallel_size=2 ep_dispatcher=all_to_all
measure gpt-oss-20b-ep2-deepep "${large[@]}" --steps 5 expert_parallel_size=2 ep_dispatcher=deepep
# The same mathematics of EP 1, rounded elsewhere: how far apart two exact answers in bf16 are.
measure lfm2-8b-ep1-loop "${small[@]}" --steps 17 use_grouped_gemm=false
measure gpt-oss-20b-ep1-layer-by-layer "${large[@]}" --steps 5 fsdp_reshard_after_forward=true

python3 -P - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from halo_core.bench import page, receipt

print(page.markdown(receipt.read(Path(sys.argv[1]))))
PYTHON
