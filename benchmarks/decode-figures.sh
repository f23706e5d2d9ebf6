#!/usr/bin/env bash
# The pictures of docs/guide/speed.md, from the result file.
set -euo pipefail
cd "$(dirname "$0")/.."
figures=docs/figures rows=benchmarks/results/decode.jsonl
foveate plot decode "$rows" --out "$figures/decode-layer.png" # figure 3 of LuKA, figure 8 of Kascade
foveate plot decode "$rows" --level model --out "$figures/decode-model.png"
