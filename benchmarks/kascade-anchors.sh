#!/usr/bin/env bash
# Do different prompts lead to the same anchors? Kascade calibrated on three data sets, and once more by divergence on
# others than in kascade-accuracy.sh.
#   benchmarks/kascade-anchors.sh MODEL DATA [OUT_FOLDER]
# MODEL: a Hugging Face folder; DATA: a folder with multihop/, ruler/ and books/. Writes a file for each data set into
# OUT_FOLDER/calibrations/MODEL, and prints them side by side.
set -euo pipefail
model=$1 data=$2 out=${3:-runs}/calibrations/$(basename "$1")
mkdir -p "$out"
out=$(realpath "$out")
calibrate() { # NAME ARGUMENT...
  foveate calibrate --model "$model" --data "$data" --anchors 5 --limit 40 --dtype float32 --out "$out/$1.json" "${@:2}"
}
calibrate musique --by similarity --task musique --split train
calibrate 2wiki --by similarity --task 2wiki --split train --length 4096
calibrate needles --by similarity --task ruler --split niah_multikey_2 --length 4096
calibrate divergence-2wiki --by divergence --method kascade:pooling=post_softmax --task 2wiki --split train --length 4096 \
  --task ruler:split=niah_multikey_3,length=4096 --limit 20 --seed 2 --batch-size 20
cd "$(dirname "$0")/.."
python -m benchmarks.tables "$out"/{musique,2wiki,needles,divergence-2wiki}.json # not those of kascade-accuracy.sh beside them
