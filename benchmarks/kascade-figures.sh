#!/usr/bin/env bash
# The pictures of docs/papers/kascade.md, from the result files.
#   benchmarks/kascade-figures.sh
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures results=benchmarks/results
rows=$results/kascade-accuracy.jsonl
ten='kascade:calibration="together-10.json",pool=layer,pooling=sqrt'
ours='kascade:calibration="divergence.json",pool=layer,pooling=post_softmax'
paper='kascade:calibration="paper.json",pool=kv_head,pooling=post_softmax'
families=(--where task=ruler --where task=hotpotqa --where task=2wiki)
for length in 8192 16384 30720; do families+=(--where "length=$length"); done
for model in $(grep -oh '"model": "[^"]*"' "$rows" | cut -d'"' -f4 | sort -u); do
  best=$ours
  [[ $model == *1.5b* ]] && best=$ten # which needs more anchors
  swept=(--where spec=streaming:window=0.3)
  for method in "$best,decode_only=true,top_k" "$paper,decode_only=true,top_k" \
    quest:top_k omnikv:top_k lessismore:top_k streaming:window; do
    for share in 0.025 0.05 0.1 0.2; do swept+=(--where "spec=$method=$share"); done
  done
  foveate plot frontier "$rows" --where "model=$model" "${families[@]}" "${swept[@]}" --over-splits --margin 1 --against kv_bytes_per_step \
    --out "$figures/kascade-frontier-$model.png"
  foveate plot calibration "$results/calibrations/$model/musique.json" \
    --out "$figures/kascade-calibration-$model.png" # figures 1, 3 and 4
  foveate plot calibration "$results/calibrations/$model/divergence.json" \
    --out "$figures/kascade-divergence-$model.png"
done
