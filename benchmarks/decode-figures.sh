#!/usr/bin/env bash
# The pictures of docs/guide/speed.md, from the result file.
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures rows=benchmarks/results/decode.jsonl
layer=(--where heads=32) model=() kascade=kascade:pool=kv_head,pooling=post_softmax
for method in dense "$kascade" luka pages:top_k=0.1 quest lessismore; do layer+=(--where "method=$method"); done
for method in dense "$kascade" luka:score=spread h2o streaming transformers-sdpa; do
  model+=(--where "method=$method")
done
foveate plot decode "$rows" "${layer[@]}" --out "$figures/decode-layer.png" # figure 3 of LuKA, figure 8 of Kascade
foveate plot decode "$rows" --level model "${model[@]}" --out "$figures/decode-model.png"
