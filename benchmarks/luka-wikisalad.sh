#!/usr/bin/env bash
# WikiSalad: the LuKA paper's Table 1 and its whole published sets, and the harder sets at 4K, 8K and 16K tokens.
#   benchmarks/luka-wikisalad.sh MODEL DATA [OUT_FOLDER] [TOKENS]
# MODEL: a Hugging Face folder; DATA: a folder with wikisalad/ and squad/; TOKENS: of a batch, 1.2 million on 80 GB for
# half a billion parameters. Writes OUT_FOLDER/luka-wikisalad.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} tokens=${4:-1200000}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-wikisalad/$(basename "$model")
mkdir -p "$parts"

compare() { # NAME TASK SPLIT LIMIT LONGEST METHOD...
  wanted "$1" || return 0
  mapfile -t chosen < <(methods "${@:6}")
  mapfile -t imports < <(imported "${@:6}")
  foveate compare --model "$model" --data "$data" --task "$2" --split "$3" --limit "$4" \
    --batch-size "$(batch "$tokens" "$5")" --dtype bfloat16 --out "$parts/$1.jsonl" \
    "${imports[@]}" "${chosen[@]}"
}

for split in easy medium hard very_hard; do
  compare "first-10-$split" wikisalad:max_new_tokens=100 "$split" 10 4096 "${table1[@]}"
  compare "all-$split" wikisalad "$split" 100 4096 "${table1[@]}"
done
for length in 4096 8192 16384; do
  compare "long-$length" "wikisalad_long:length=$length" test 70 "$length" "${frontier[@]}"
done
awk '!seen[$0]++' "$out"/luka-wikisalad/*/*.jsonl > "$out/luka-wikisalad.jsonl"
