#!/usr/bin/env bash
# Points and speed of the same model in the same run, at lengths and batches at which the defaults are sparse on a GPU:
# every method is attached as `foveate.attach` attaches it, with its own bound (--dense-below auto), and `auto` is what it
# takes by itself.
#   benchmarks/end-to-end.sh MODEL DATA [OUT_FOLDER] [ITEMS]
# MODEL: a Hugging Face folder whose calibration comes with foveate or is kept (`foveate calibrate`); DATA: a folder with
# ruler/, books/, multihop/, longproc/ and aime/ (docs/guide/data.md). ITEMS: of each task, 128 if left out, so that all
# batches are full; tasks with long answers take half as many, and the cell of 130,000 tokens (with YaRN) three eighths.
# Writes OUT_FOLDER/end-to-end.jsonl. CELLS: see luka-methods.sh; a cell is named SEQUENCESxLENGTH-TASK.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") items=${4:-128}
mkdir -p "${3:-runs}/end-to-end/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/end-to-end/$(basename "$model")"
if wanted 4x130K-niah_multikey_2; then # before anything is measured: not every model can have longer contexts
  with_yarn "$model" "longer/$(basename "$model")"
fi

compare() { # SEQUENCES NAME ARGUMENT...
  local cell=$1x$((length / 1000))K-$2
  wanted "$cell" || return 0
  foveate compare --model "$model" --data "$data" --batch-size "$1" --dtype bfloat16 --dense-below auto \
    --length "$length" --out "$cell.jsonl" "${@:3}" "${chosen[@]}"
}

length=30000
for sequences in 16 8; do
  mapfile -t chosen < <(methods dense auto kascade pages snapkv:top_k=0.25) # luka is dense below 512K tokens with two KV heads
  if [[ $sequences == 8 ]]; then # and pages, too
    mapfile -t chosen < <(methods dense auto kascade snapkv:top_k=0.25)
  fi
  for split in niah_multikey_2 niah_multikey_3; do
    compare "$sequences" "$split" --task ruler --split "$split" --limit "$items"
  done
  compare "$sequences" hotpotqa --task hotpotqa --limit "$items"
  compare "$sequences" countdown --task longproc --split countdown_0.5k --limit "$(((items + 1) / 2))"
  compare "$sequences" math500 --task math --split math500 --limit "$(((items + 1) / 2))"
done
length=130000 model=longer/$(basename "$model")
mapfile -t chosen < <(methods dense auto kascade pages snapkv:top_k=0.25)
compare 4 niah_multikey_2 --task ruler --split niah_multikey_2 --limit "$(((items * 3 + 7) / 8))"
cat ../*/*.jsonl > "$out/end-to-end.jsonl"
