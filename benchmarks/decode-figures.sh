#!/usr/bin/env bash
# The pictures of docs/guide/speed.md, from the result files.
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures results=benchmarks/results
layer=(--where heads=32) model=(--where model=llama-3.1-8b)
for method in dense kascade:pool=kv_head,pooling=post_softmax luka pages:top_k=0.1 quest lessismore; do
  layer+=(--where "method=$method")
done
for method in dense kascade:anchors=10 pages luka snapkv:top_k=0.25; do model+=(--where "method=$method"); done
foveate plot decode "$results/decode.jsonl" "${layer[@]}" --out "$figures/decode-layer.png" # figure 3 of LuKA, figure 8 of Kascade
foveate plot decode "$results/recommended-times.jsonl" --level model "${model[@]}" --out "$figures/decode-model.png"
