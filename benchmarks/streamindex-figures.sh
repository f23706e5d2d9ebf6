#!/usr/bin/env bash
# The pictures of docs/papers/streamindex.md, from the result files.
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures results=benchmarks/results
python -m benchmarks.csa_plots "$results/indexer.jsonl" "$figures/streamindex-lengths.png"     # figure 2
python -m benchmarks.csa_plots "$results/indexer-study.jsonl" "$figures/streamindex-tiles.png" # figure 3
