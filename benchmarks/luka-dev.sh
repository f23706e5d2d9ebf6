#!/usr/bin/env bash
# Settings of LuKA side by side, on items that no other file reports: what its defaults were chosen by.
#   benchmarks/luka-dev.sh MODEL DATA [OUT_FOLDER] [BATCH]
# MODEL: a Hugging Face folder; DATA: a folder with squad/ and books/. Writes OUT_FOLDER/luka-dev.jsonl.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} batch=${4:-75}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-dev/$(basename "$model")
mkdir -p "$parts"

settings=(dense luka_paper luka:top_k=3)
for top_k in 0.03 0.06 0.12; do
  settings+=("luka:top_k=$top_k" "luka:top_k=$top_k,score=summary,bias=log" "luka:top_k=$top_k,page_size=32")
done
settings+=(
  luka:top_k=0.06,bias=log luka:top_k=0.06,score=summary,bias=spread luka:top_k=0.06,score=bound,bias=log
  luka:top_k=0.06,bias=entropy luka:top_k=0.06,mass=preserve luka:top_k=0.06,pool=layer
  luka:top_k=0.06,sinks=0 luka:top_k=0.06,compressor=attention,temperature=1 luka:top_k=0.06,compressor=attention
  luka:top_k=0.06,segmenter=gaussian,page_deviation=4.0 luka:top_k=0.06,segmenter=kl
  luka:top_k=0.15 luka:page_size=32,top_k=0.18 luka:page_size=64,top_k=0.03 luka:page_size=[16,64],top_k=0.06 luka:page_size=[16,128],top_k=0.06
  luka:page_size=[16,64,256],top_k=0.06
  luka:refine=top_p,top_p=0.9,max_refined=0.25 luka:refine=missed_mass,max_refined=0.25
)

compare() { # NAME TASK LENGTH SPLIT LIMIT
  mapfile -t chosen < <(methods "${settings[@]}")
  foveate compare --model "$model" --data "$data" --task "$2" --length "$3" --split "$4" --limit "$5" --seed 1 \
    --batch-size "$batch" --dtype bfloat16 --out "$parts/$1.jsonl" "${chosen[@]}"
}

compare salad-8192 wikisalad_long 8192 dev 30
compare needles-8192 niah 8192 multi 150
cat "$out"/luka-dev/*/*.jsonl > "$out/luka-dev.jsonl"
