#!/usr/bin/env bash
# What a prompt costs in time and peak memory: a layer's attention at 8K to 128K tokens, and models to the first token.
# Needs a GPU. Rows are kept as they come, and those of other cases stay.
#   benchmarks/prefill.sh MODEL runs/prefill.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?MODEL: a folder, such as of Qwen2.5-Coder-0.5B-Instruct} out=${2:?OUT: a file of rows}
sparse=kascade:pool=kv_head,pooling=post_softmax,decode_only=false
methods=()
for method in dense "$sparse" "$sparse,dense_anchor_prefill=false" streaming snapkv tova h2o luka; do
  methods+=(--method "$method")
done
python -m benchmarks.layer prefill "${methods[@]}" --out "$out"
foveate bench prefill-model "${methods[@]}" --method luka:compressor=attention --method mixed --model "$model" --out "$out"
