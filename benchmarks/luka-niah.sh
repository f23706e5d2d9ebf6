#!/usr/bin/env bash
# One needle in a novel at 8K, 16K and 30K tokens: the frontier of accuracy against keys read.
#   benchmarks/luka-niah.sh MODEL DATA [OUT_FOLDER] [TOKENS] [ITEMS]
# MODEL: a Hugging Face folder; DATA: a folder with books/; TOKENS: of a batch, 1.2 million on 80 GB for half a billion
# parameters. Writes OUT_FOLDER/luka-niah.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} tokens=${4:-1200000} items=${5:-340}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-niah/$(basename "$model")
mkdir -p "$parts"
mapfile -t chosen < <(methods "${frontier[@]}")
for length in 8192 16384 30720; do
  wanted "needle-$length" || continue
  foveate compare --model "$model" --task niah --data "$data" --length "$length" --limit "$items" \
    --batch-size "$(batch "$tokens" "$length")" --dtype bfloat16 --out "$parts/needle-$length.jsonl" "${chosen[@]}"
done
awk '!seen[$0]++' "$out"/luka-niah/*/*.jsonl > "$out/luka-niah.jsonl"
