#!/usr/bin/env bash
# Points and speed of the same model in the same run, at lengths and batches at which the defaults are sparse on a GPU:
# every method is attached as `foveate.attach` attaches it, with its own bound (--dense-below auto), and `auto` is what it
# takes by itself.
#   benchmarks/end-to-end.sh MODEL DATA [OUT_FOLDER] [ITEMS]
# MODEL: a Hugging Face folder whose calibration comes with foveate or is kept (`foveate calibrate`); DATA: a folder with
# ruler/, books/, multihop/, longproc/ and aime/ (docs/guide/data.md); ITEMS: of each task, half as many of those with
# long answers, 128 if left out, so that all batches are full. Writes OUT_FOLDER/end-to-end.jsonl. CELLS: see
# luka-methods.sh; a cell is named SEQUENCESx30K-TASK.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") items=${4:-128}
mkdir -p "${3:-runs}/end-to-end/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/end-to-end/$(basename "$model")"

compare() { # SEQUENCES NAME ARGUMENT...
  wanted "$1x30K-$2" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$1" --dtype bfloat16 --dense-below auto \
    --out "$1x30K-$2.jsonl" "${@:3}" "${chosen[@]}"
}

for sequences in 16 8; do
  mapfile -t chosen < <(methods dense auto kascade pages snapkv:top_k=0.25) # luka is dense: the 1.5B has two KV heads
  if [[ $sequences == 8 ]]; then # and pages, too
    mapfile -t chosen < <(methods dense auto kascade snapkv:top_k=0.25)
  fi
  for split in niah_multikey_2 niah_multikey_3; do
    compare "$sequences" "$split" --task ruler --split "$split" --length 30000 --limit "$items"
  done
  compare "$sequences" hotpotqa --task hotpotqa --length 30000 --limit "$items"
  compare "$sequences" countdown --task longproc --split countdown_0.5k --length 30000 --limit "$((items / 2))"
  compare "$sequences" math500 --task math --split math500 --length 30000 --limit "$((items / 2))"
done
cat ../*/*.jsonl > "$out/end-to-end.jsonl"
