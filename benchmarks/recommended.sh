#!/usr/bin/env bash
# What the recommended specs keep of dense attention's score, exactly as README names them: each reported family of tasks,
# and answers of 500 tokens and more, where errors of sparse steps add up.
#   benchmarks/recommended.sh MODEL DATA [OUT_FOLDER] [TOKENS] [ITEMS]
# MODEL: a Hugging Face folder; DATA: a folder with ruler/, books/, multihop/, wikisalad/, longproc/ and aime/
# (docs/guide/data.md); TOKENS: of a batch, 260,000 on 80 GB for 1.5 billion parameters; ITEMS: of each RULER task at each
# length, half as many of LongProc. `kascade` reads the anchors that come with foveate for the weights, or that `foveate calibrate --model MODEL` has
# kept. Writes OUT_FOLDER/recommended.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") tokens=${4:-260000} items=${5:-100}
mkdir -p "${3:-runs}/recommended/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/recommended/$(basename "$model")"
mapfile -t chosen < <(methods dense kascade pages luka snapkv:top_k=0.25)

compare() { # NAME LENGTH ARGUMENT...
  wanted "$1" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$(batch "$tokens" "$2")" --dtype bfloat16 \
    --out "$1.jsonl" "${@:3}" "${chosen[@]}"
}

for length in 4096 8192 16384; do
  for split in niah_multikey_1 niah_multikey_2 niah_multikey_3; do
    compare "$split-$length" "$length" --task ruler --split "$split" --length "$length" --limit "$items"
  done
done
compare hotpotqa 4096 --task hotpotqa --limit 200
compare 2wiki 4096 --task 2wiki --limit 164
compare wikisalad 4096 --task wikisalad --split hard --limit 100
for split in tom_tracking_0.5k countdown_0.5k tom_tracking_2k countdown_2k; do
  compare "longproc-$split" 8192 --task longproc --split "$split" --limit "$((items / 2))"
done
compare math500 4096 --task math --split math500 --limit 500
compare aime24 9216 --task math:samples=8,temperature=0.6,top_p=0.95 --split aime24 --limit 30
cat ../*/*.jsonl > "$out/recommended.jsonl"
