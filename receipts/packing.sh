#!/usr/bin/env bash
# Makes the receipts about packing on a machine with one GPU: the same rows, a quarter of max_length long in the mean,
# padded, packed and flattened, one and four rows of a batch.
#   receipts/packing.sh FOLDER [NAME ...]
# Without names all are made. Each measurement has LIMIT seconds and its own log; one that fails does not keep the others
# from running. PRECISION="bf16=true" trains with stochastic rounding in place of torch's fused AdamW. SMALL=1 runs the same on tiny models, for trying this script on a machine without a GPU.
set -uo pipefail
folder=$1
shift
only=" $* "
limit=${LIMIT:-120}
read -ra precision <<<"${PRECISION:-dtype=bfloat16}"
mkdir -p "$folder"

# The whole LFM2-8B-A1B, AdamW with two bf16 moments: 50 GB. GPT-OSS 20B cut to half of its layers.
short=(--model LiquidAI/LFM2-8B-A1B --rows 64)
sinks=(--model openai/gpt-oss-20b --layers 12 --rows 64)
shape=(--seq 4096 --mean-length 1024 --warmup 4 "${precision[@]}")
padded=(attn_implementation=sdpa)
eager=(attn_implementation=eager)
flash=(attn_implementation=flash_attention_2)
if [ -n "${SMALL:-}" ]; then
    short=(--model tiny --family lfm2 --rows 12)
    sinks=(--model tiny --family gpt_oss --rows 12)
    shape=(--seq 64 --mean-length 16 --warmup 1 dtype=float32)
    printf 'kernels:\n  attention: reference\n' >"$folder/reference.yaml"
    flash+=("$folder/reference.yaml")
fi

# measure NAME OPTIONS...
measure() {
    local name=$1 began=$SECONDS
    shift
    if [ "$only" != "  " ] && [ "${only/ $name /}" = "$only" ]; then return; fi
    echo "== $name"
    timeout --kill-after=10 "$limit" python3 -P -m halo_core.cli.main bench "$@" "${shape[@]}" \
        --out "$folder/$name.json" >"$folder/$name.log" 2>&1
    local code=$?
    tail -n 12 "$folder/$name.log"
    echo "== $name ended with $code after $((SECONDS - began)) s"
    if [ $code -eq 0 ]; then rm -f "$folder/$name.log"; fi
}

for batch in 1 4; do
    # What a run has when nothing is asked for: transformers' attention, rows padded to the longest of their batch.
    measure "lfm2-8b-padding-sdpa-$batch" "${short[@]}" --batch $batch "${padded[@]}"
    # The same attention kernel in all three, so that only the layout of rows differs.
    measure "lfm2-8b-padding-$batch" "${short[@]}" --batch $batch "${flash[@]}"
    measure "lfm2-8b-padding-free-$batch" "${short[@]}" --batch $batch "${flash[@]}" padding_free=true
    measure "lfm2-8b-packing-$batch" "${short[@]}" --batch $batch "${flash[@]}" packing=true
done
for batch in 1 4; do
    measure "gpt-oss-20b-padding-eager-$batch" "${sinks[@]}" --batch $batch "${eager[@]}"
    measure "gpt-oss-20b-padding-$batch" "${sinks[@]}" --batch $batch "${flash[@]}"
    measure "gpt-oss-20b-padding-free-$batch" "${sinks[@]}" --batch $batch "${flash[@]}" padding_free=true
    measure "gpt-oss-20b-packing-$batch" "${sinks[@]}" --batch $batch "${flash[@]}" packing=true
done

python3 -P - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from halo_core.bench import page, receipt

print(page.markdown(receipt.read(Path(sys.argv[1]))))
PYTHON
