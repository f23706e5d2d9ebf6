#!/usr/bin/env bash
# Learned eviction on a frozen model: train it, then compare it with other methods at the same memory.
#   benchmarks/frozen-lte.sh MODEL TEXT DATA [OUT_FOLDER]
# MODEL: a Hugging Face folder; TEXT: plain text to learn on (`foveate train lte`), without the novels of DATA, a folder
# with books/ and multihop/ (docs/guide/data.md). Writes OUT_FOLDER/frozen-lte.jsonl; 15 minutes of one H100. CELLS: see
# luka-methods.sh. Every method keeps the same number of tokens of a KV head, its window included: 3, 5, 10 and 25 % of
# 4,096; with allocation=global this is the mean over KV heads.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") text=$(realpath "$2") data=$(realpath "$3")
mkdir -p "${4:-runs}/frozen-lte"
out=$(realpath "${4:-runs}")
source "$here/luka-methods.sh"
cd "$out/frozen-lte" # specs name the file as it is called here
if [ ! -f lte.safetensors ]; then
  foveate train lte --model "$model" --text "$text" --out lte.safetensors --steps 1200 --minutes 6 --length 4096 --window 32
fi
kept=(dense)
for tokens in 123 205 410 1024; do
  learned="lte:top_k=$tokens,window=32,sinks=4,file=\"lte.safetensors\""
  kept+=("$learned,allocation=uniform" "$learned,allocation=global" "lte:score=key_norm,top_k=$tokens,window=32,sinks=4")
  kept+=("snapkv:top_k=$((tokens - 32)),window=32" "tova:top_k=$tokens,min_k=1")
  kept+=("h2o:top_k=$((tokens - tokens / 2)),window=$((tokens / 2))" "streaming:sinks=4,window=$((tokens - 4))")
done
mapfile -t chosen < <(methods "${kept[@]}")
for question in after with; do
  for task in ruler:split=niah_single_3,max_new_tokens=48 ruler:split=niah_multikey_1,max_new_tokens=24 hotpotqa musique; do
    name=$question-${task//[:=,]/-}
    wanted "$name" || continue
    foveate compare --model "$model" --data "$data" --task "$task" --length 4096 --question "$question" --limit 32 \
      --batch-size 32 --out "$name.jsonl" "${chosen[@]}"
  done
done
cat {after,with}-*.jsonl > "$out/frozen-lte.jsonl"
