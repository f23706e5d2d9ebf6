#!/usr/bin/env bash
# The pictures of docs/streamindex.md, from the result files.
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures results=benchmarks/results
foveate plot indexer "$results/indexer.jsonl" --out "$figures/streamindex-lengths.png"           # figure 2
foveate plot indexer-tiles "$results/indexer-study.jsonl" --out "$figures/streamindex-tiles.png" # figure 3
