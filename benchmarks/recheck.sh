#!/usr/bin/env bash
# Measures ten cells of the accuracy rows again, one of each kind of method at 2K to 8K tokens, and compares them.
#   benchmarks/recheck.sh MODEL DATA [OUT_FOLDER]
# MODEL: the folder of Qwen2.5-Coder-0.5B-Instruct; DATA: a folder with ruler/, books/, squad/ and wikisalad/
# (docs/guide/data.md). Writes OUT_FOLDER/recheck.jsonl, and ends with 1 if a score differs. CELLS: see luka-methods.sh. Needs 80
# GB; a smaller --batch-size in the place of the rows' pads prompts otherwise.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2")
mkdir -p "${3:-runs}/recheck"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/recheck" # specs name the calibration as it is called here
cp "$here/results/calibrations/qwen2.5-coder-0.5b-instruct/divergence.json" .

compare() { # NAME BATCH ARGUMENT... -- METHOD...
  local name=$1 batch=$2 arguments=()
  shift 2
  wanted "$name" || return 0
  while [ "$1" != -- ]; do arguments+=("$1") && shift; done
  mapfile -t chosen < <(methods dense "${@:2}")
  foveate compare --model "$model" --data "$data" --batch-size "$batch" --dtype bfloat16 --out "$name.jsonl" \
    "${arguments[@]}" "${chosen[@]}"
}

compare multikey_2 97 --task ruler --split niah_multikey_2 --length 8192 --limit 67 -- \
  'kascade:pool=layer,pooling=post_softmax,decode_only=true,calibration="divergence.json"' quest omnikv
compare single_3 97 --task ruler --split niah_single_3 --length 8192 --limit 67 -- lessismore
compare needle 146 --task niah --split single --length 8192 --limit 340 -- tova:top_k=0.1 streaming:window=0.25
compare long 292 --task wikisalad_long:length=4096 --split test --limit 70 -- \
  luka:score=spread h2o:top_k=0.25,window=64 snapkv:top_k=0.1
compare very_hard 292 --task wikisalad:max_new_tokens=100 --split very_hard --limit 10 -- luka_paper
rm divergence.json
PYTHONPATH=$here/.. python -m benchmarks.recheck "$out/recheck.jsonl" ./*.jsonl
