#!/usr/bin/env bash
# How many keys long answers need: errors of sparse steps add up over hundreds of tokens. Settings are chosen on Countdown
# and Tom tracking (LongProc) and reported on MATH-500, each after a novel of 30,000 tokens, and each alone (`short`).
#   benchmarks/long-answers.sh MODEL DATA [OUT_FOLDER] [ITEMS] [TOKENS]
# MODEL, DATA: as of end-to-end.sh. ITEMS: of each task, 64 if left out; TOKENS: of a batch after a novel, 480,000 if left
# out. All steps are sparse (--dense-below 0). Writes OUT_FOLDER/long-answers.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") items=${4:-64} tokens=${5:-480000}
mkdir -p "${3:-runs}/long-answers/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/long-answers/$(basename "$model")"
mapfile -t chosen < <(methods dense kascade kascade:top_k=0.2 kascade:min_k=1024 kascade:min_k=2048 pages pages:top_k=0.5)

compare() { # NAME LENGTH ARGUMENT...
  wanted "$1" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$(batch "$tokens" "$2")" --dtype bfloat16 \
    --limit "$items" --out "$1.jsonl" "${@:3}" "${chosen[@]}"
}

for split in countdown_0.5k tom_tracking_0.5k countdown_2k tom_tracking_2k; do
  compare "$split" 30000 --task longproc --split "$split" --length 30000
  compare "short-$split" 8192 --task longproc --split "$split"
done
compare math500 30000 --task math --split math500 --length 30000
compare short-math500 8192 --task math --split math500
cat ../*/*.jsonl > "$out/long-answers.jsonl"
