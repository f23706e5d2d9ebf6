#!/usr/bin/env bash
# One needle in a novel at 8K and 16K tokens: every method beside dense on the same items.
#   benchmarks/first-niah.sh MODEL DATA [OUT_FOLDER] [ITEMS] [BATCH]
# MODEL: a Hugging Face folder (Qwen2.5-Coder-0.5B-Instruct for the committed rows); DATA: a folder with books/.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} items=${4:-100} batch=${5:-20}
mkdir -p "$out"
for length in 8192 16384; do
  foveate compare --model "$model" --task niah --data "$data" --length "$length" --limit "$items" \
    --batch-size "$batch" --dtype bfloat16 --out "$out/niah-$length.jsonl" \
    --method dense --method streaming:window=0.125 --method uniform --method tova:top_k=0.125 \
    --method snapkv --method h2o \
    --method luka:compressor=attention,mass=preserve --method luka --method luka:top_k=0.12 \
    --method mixed --method 'per_layer:layers={"0-1": "dense", "rest": "luka:top_k=0.12"}'
done
cat "$out/niah-8192.jsonl" "$out/niah-16384.jsonl" > "$out/first-niah.jsonl"
