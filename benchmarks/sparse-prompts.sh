#!/usr/bin/env bash
# What sparse prompts cost in points: Kascade reads a prompt by the keys that each tile chose, alone and beside the mean of
# the keys that it did not choose (rest=mean), with a tenth and a fifth of the keys. The rows with dense prompts are the
# control: they lose what the answers alone lose.
#   benchmarks/sparse-prompts.sh MODEL DATA [OUT_FOLDER] [ITEMS]
# MODEL: a Hugging Face folder whose calibration comes with foveate or is kept (`foveate calibrate`); DATA: a folder with
# ruler/, books/ and multihop/ (docs/guide/data.md); ITEMS: of each task and length, 96 if left out. Writes
# OUT_FOLDER/sparse-prompts-means.jsonl. CELLS: see luka-methods.sh; a cell is named LENGTH-TASK.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") items=${4:-96}
mkdir -p "${3:-runs}/sparse-prompts/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/sparse-prompts/$(basename "$model")"

specs=(dense)
for share in 0.1 0.2; do
  specs+=("kascade:top_k=$share" "kascade:top_k=$share,decode_only=false" "kascade:top_k=$share,decode_only=false,rest=mean")
done
mapfile -t chosen < <(methods "${specs[@]}")

compare() { # LENGTH NAME ARGUMENT...
  wanted "$1-$2" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$(batch 262144 "$1")" --dtype bfloat16 --limit "$items" \
    --length "$1" --out "$1-$2.jsonl" "${@:3}" "${chosen[@]}"
}

for length in 8192 30000 16384; do
  for split in niah_multikey_3 niah_multikey_2; do
    compare "$length" "$split" --task ruler --split "$split"
  done
  for task in hotpotqa 2wiki; do
    compare "$length" "$task" --task "$task"
  done
done
cat ../*/*.jsonl > "$out/sparse-prompts-means.jsonl"
