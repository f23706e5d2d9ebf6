#!/usr/bin/env bash
# The pictures of docs/luka.md, from the result files; the attention map (figure 1 of the paper) needs a model.
#   benchmarks/luka-figures.sh [MODEL]
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures rows=benchmarks/results/luka-perplexity.jsonl
if [ -f "$rows" ]; then
  foveate plot perplexity "$rows" --where continuation=512 --where zero_values=False --to-dense \
    --out "$figures/luka-compressors.png"                                                          # figure 4
  foveate plot modes "$rows" --where continuation=1024 --to-dense --out "$figures/luka-modes.png" # figure 5
  foveate plot perplexity "$rows" --where continuation=512 --where mass=exact --where sinks=0 --to-dense \
    --out "$figures/luka-values.png"                                                               # figure 6
  foveate plot modes "$rows" --where continuation=512 --where top_k=3 --to-dense --out "$figures/luka-biases.png"
fi
if [ $# -gt 0 ]; then
  foveate plot attention-map --model "$1" --out "$figures/luka-attention.png" # figure 1
fi
