#!/usr/bin/env bash
# Times of the specs that README recommends, on one card in one run: steps and prompts of whole models, a layer's attention,
# and steps with keys and values in host memory. Needs a GPU.
#   benchmarks/recommended-times.sh MODEL [OUT_FOLDER]
# MODEL: a folder for which a calibration is known, such as of Qwen2.5-Coder-1.5B-Instruct. The 8B's shape has random
# weights, so `kascade` has ten evenly spaced anchors there, and `lte` scores by key norms. Each cell is a file that is
# kept as soon as it is measured; OUT_FOLDER/recommended-times.jsonl has them all. CELLS: see luka-methods.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?MODEL: a folder, such as of Qwen2.5-Coder-1.5B-Instruct} out=${2:-runs}
source benchmarks/luka-methods.sh
cells=$out/recommended-times
mkdir -p "$cells"
others=(pages luka snapkv:top_k=0.25 lte:score=key_norm,top_k=0.1 streaming:window=1024)
mapfile -t trained < <(methods dense kascade "${others[@]}")
mapfile -t random < <(methods dense kascade:anchors=10 "${others[@]}")
mapfile -t few < <(methods dense kascade:anchors=10 pages)

cell() { # NAME COMMAND...
  if wanted "$1" && [ ! -e "$cells/$1.jsonl" ]; then
    "${@:2}" --out "$cells/$1.jsonl"
  fi
}
longer() { # NAME ARGUMENT...: the same weights with YaRN for 132,000 tokens
  wanted "$1" || return 0
  local folder=$cells/longer/$1/$(basename "$model") # of a cell, because cells may run side by side
  with_yarn "$model" "$folder"
  cell "$1" whole --model "$folder" "${@:2}"
}
whole() { foveate bench decode-model "$@"; }
prompt() { foveate bench prefill-model "$@"; }
layer() { python -m benchmarks.layer decode "$@"; }

for case in 32768x1 131072x1 32768x8; do
  cell "8b-$case" whole --context "${case%x*}" --batch "${case#*x}" "${random[@]}"
done
for case in 8192x32 131072x4; do
  cell "8b-$case" whole --context "${case%x*}" --batch "${case#*x}" "${few[@]}"
done
cell offload-131072 whole --offload --context 131072 --memory 24GB --method pages --method pages:top_k=0.125 --method luka
for case in 32000x1 32000x8 8192x32; do # the model has positions for 32,768 tokens
  cell "trained-$case" whole --model "$model" --context "${case%x*}" --batch "${case#*x}" "${trained[@]}"
done
for case in 131072x1 131072x4; do
  longer "trained-$case" --context "${case%x*}" --batch "${case#*x}" "${trained[@]}"
done
for case in {8192,16384,32768,65536,131072}x{1,16,64}; do
  cell "layer-$case" layer --context "${case%x*}" --batch "${case#*x}" "${random[@]:0:8}"
done
cell prompts prompt --model "$model" "${trained[@]}"
cell offload-524288 whole --offload --context 524288 --memory 80GB --method pages:top_k=0.125 --steps 32 --no-baseline
cat "$cells"/*.jsonl > "$out/recommended-times.jsonl"
