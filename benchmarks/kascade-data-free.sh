#!/usr/bin/env bash
# Are anchors that were calibrated without data as good? Beside those of other prompts, the paper's and evenly spaced
# ones; and what sparse prompts cost with them, by the keys that are read at least.
#   benchmarks/kascade-data-free.sh MODEL DATA [OUT_FOLDER]
# MODEL: Qwen2.5-Coder-1.5B-Instruct; DATA: a folder with ruler/ and multihop/. Writes calibrations/MODEL/data-free.json
# and kascade-data-free.jsonl into OUT_FOLDER; the other calibrations are those of benchmarks/results.
set -euo pipefail
model=$(realpath "$1") data=$(realpath "$2") out=${3:-runs}
given=$(realpath "$(dirname "$0")")/results/calibrations/$(basename "$1")
mkdir -p "$out/calibrations/$(basename "$1")"
cd "$out"
made=calibrations/$(basename "$1")/data-free.json
[ -f "$made" ] || foveate calibrate --model "$model" --anchors 10 --out "$made"
cp "$given"/*.json .
cp "$made" .
rows=$PWD/kascade-data-free
shape=pool=layer,pooling=sqrt
compare() { # NAME TASK LENGTH LIMIT METHOD...
  local name=$1 task=$2 length=$3 limit=$4 methods=() one
  shift 4
  for one; do methods+=(--method "$one"); done
  foveate compare --model "$model" --data "$data" --task "$task" --length "$length" --limit "$limit" \
    --batch-size $((260000 / length)) --out "$rows-$name-$length.jsonl" --method dense "${methods[@]}"
}
decode=("kascade:calibration=\"data-free.json\",$shape,decode_only=true" "kascade:calibration=\"together-10.json\",$shape,decode_only=true"
  "kascade:calibration=\"musique.json\",$shape,decode_only=true" 'kascade:calibration="paper.json",pool=kv_head,pooling=post_softmax,decode_only=true'
  "kascade:anchors=10,$shape,decode_only=true")
free="kascade:calibration=\"data-free.json\",$shape,decode_only=false"
sparse=("$free" "$free,min_k=2048" "$free,top_k=0.25")
for split in 1 2 3; do
  tokens=$((split == 3 ? 40 : 24))
  compare "multikey_$split" "ruler:split=niah_multikey_$split,max_new_tokens=$tokens" 8192 60 "${decode[@]}" \
    $([ $split = 1 ] || printf '%s\n' "${sparse[@]}")
  compare "multikey_$split" "ruler:split=niah_multikey_$split,max_new_tokens=$tokens" 16384 60 "${decode[@]}" "${sparse[@]}"
done
compare 2wiki 2wiki 8192 100 "${decode[@]}"
cat "$rows"-*.jsonl > "$rows.jsonl"
