#!/usr/bin/env bash
# How many keys long answers need: errors of sparse steps add up over hundreds of tokens. Settings are chosen on Countdown
# and Tom tracking (LongProc) and reported on MATH-500, each after a novel, in prompts of 30,000 and 8,192 tokens.
#   benchmarks/long-answers.sh MODEL DATA [OUT_FOLDER] [ITEMS] [TOKENS]
# MODEL, DATA: as of end-to-end.sh. ITEMS: of each task, 96 if left out; TOKENS: of a batch, 960,000 if left out, which
# takes a GPU of 140 GB. All steps are sparse (--dense-below 0). Writes OUT_FOLDER/long-answers.jsonl. CELLS: see
# luka-methods.sh; a cell is named LENGTH-TASK.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") items=${4:-96} tokens=${5:-960000}
mkdir -p "${3:-runs}/long-answers/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/long-answers/$(basename "$model")"

compare() { # LENGTH NAME ARGUMENT...
  wanted "$1-$2" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$(batch "$tokens" "$1")" --dtype bfloat16 \
    --limit "$items" --length "$1" --out "$1-$2.jsonl" "${@:3}" "${chosen[@]}"
}

for length in 30000 8192; do
  mapfile -t chosen < <(methods dense kascade kascade:top_k=0.2 kascade:top_k=0.3 pages pages:top_k=0.5)
  if [[ $length == 8192 ]]; then # of which a tenth is 819 tokens
    mapfile -t chosen < <(methods dense kascade kascade:min_k=2048 kascade:top_k=0.2 kascade:top_k=0.3 pages pages:top_k=0.5)
  fi
  for split in countdown_0.5k tom_tracking_0.5k; do
    compare "$length" "$split" --task longproc --split "$split"
  done
  compare "$length" math500 --task math --split math500
done
cat ../*/*.jsonl > "$out/long-answers.jsonl"
