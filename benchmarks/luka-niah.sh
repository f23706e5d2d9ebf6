#!/usr/bin/env bash
# One needle in a novel at 8K, 16K and 30K tokens: the frontier of accuracy against keys read.
#   benchmarks/luka-niah.sh MODEL DATA [OUT_FOLDER] [ITEMS] [BATCH]
# MODEL: a Hugging Face folder; DATA: a folder with books/. Writes OUT_FOLDER/luka-niah.jsonl. Every call resumes.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} items=${4:-200} batch=${5:-100}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-niah/$(basename "$model")
mkdir -p "$parts"
mapfile -t chosen < <(methods "${frontier[@]}")
for length in 8192 16384 30720; do
  foveate compare --model "$model" --task niah --data "$data" --length "$length" --limit "$items" \
    --batch-size "$((length > 20000 ? batch / 2 : batch))" --dtype bfloat16 --out "$parts/$length.jsonl" "${chosen[@]}"
done
cat "$out"/luka-niah/*/*.jsonl > "$out/luka-niah.jsonl"
