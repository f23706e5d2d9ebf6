#!/usr/bin/env bash
# The pictures of docs/papers/luka.md, from the result files; the attention map (figure 1 of the paper) needs a model.
#   benchmarks/luka-figures.sh [MODEL]
set -euo pipefail
cd "$(dirname "$0")/.."
source benchmarks/luka-methods.sh
figures=docs/figures results=benchmarks/results
rows=$results/luka-perplexity.jsonl
if [ -f "$rows" ]; then
  plot() { python -m benchmarks.perplexity_plots "$1" "$rows" "$figures/$2" "${@:3}"; }
  plot refined luka-compressors.png continuation=512 zero_values=False # figure 4
  plot modes luka-modes.png continuation=1024                          # figure 5
  plot refined luka-values.png continuation=512 mass=exact sinks=0     # figure 6
  plot modes luka-biases.png continuation=512 top_k=3
fi
rows=("$results/luka-niah.jsonl" "$results/luka-wikisalad.jsonl")
if [ -f "${rows[0]}" ] && [ -f "${rows[1]}" ]; then
  families=(--where task=niah --where task=wikisalad_long)
  for length in 4096 8192 16384 30720; do families+=(--where "length=$length"); done
  for spec in "${frontier[@]}"; do # some cells have rows of score=spread alone
    [[ $spec == luka:page_size=16,* ]] && continue
    families+=(--where "spec=$spec")
    [[ $spec == luka:* && $spec != *score=* ]] && families+=(--where "spec=$spec,score=spread")
  done
  for model in $(grep -oh '"model": "[^"]*"' "${rows[@]}" | cut -d'"' -f4 | sort -u); do
    foveate plot frontier "${rows[@]}" --where "model=$model" "${families[@]}" --along page_size --recommended luka \
      --margin 2 --out "$figures/luka-frontier-$model.png"
  done
fi
if [ $# -gt 0 ]; then
  python -m benchmarks.attention_map "$1" "$figures/luka-attention.png" # figure 1
fi
