#!/usr/bin/env bash
# The Kascade paper's Table 3: attention of decode steps and of prompts beside FlashAttention-3, at 10, 20 and 30 % of the
# keys. Ran on an H200; keys and values alone take 64 GiB. Needs pip install tokenspeed-fa3==3.0.0.post20260810.
#   benchmarks/kascade-table3.sh runs/kascade-table3.jsonl runs/kascade-table3-prompts.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."
decode=${1:?OUT: a file of rows} prefill=${2:?PROMPTS: a file of rows}
lengths=()
for length in 8192 16384 32768 65536 131072 262144; do
  lengths+=(--context "$length")
done
methods() { # MORE: further settings
  for share in "" ,top_k=0.2 ,top_k=0.3; do
    printf -- '--method\nkascade:pool=kv_head,pooling=post_softmax%s%s\n' "$share" "$1"
  done
}
mapfile -t steps < <(methods "")
mapfile -t prompts < <(methods ,decode_only=false)
python -m benchmarks.layer decode --batch 64 "${lengths[@]}" --method dense "${steps[@]}" --out "$decode"
python -m benchmarks.layer decode --batch 32 --context 524288 --method dense "${steps[@]}" --out "$decode"
python -m benchmarks.layer prefill "${lengths[@]}" --method dense "${prompts[@]}" \
  --method kascade:pool=kv_head,pooling=post_softmax,decode_only=false,dense_anchor_prefill=false --out "$prefill"
