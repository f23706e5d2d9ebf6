#!/usr/bin/env bash
# Settings of LuKA side by side, on items that no other file reports: what its defaults were chosen by.
#   benchmarks/luka-dev.sh MODEL DATA [OUT_FOLDER] [TOKENS]
# MODEL: a Hugging Face folder; DATA: a folder with squad/ and books/; TOKENS: of a batch, 1.2 million on 80 GB for half
# a billion parameters. Writes OUT_FOLDER/luka-dev.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} tokens=${4:-1200000}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-dev/$(basename "$model")
mkdir -p "$parts"

compare() { # NAME TASK LENGTH SPLIT LIMIT METHOD...
  wanted "$1" || return 0
  mapfile -t chosen < <(methods dense "${@:6}")
  foveate compare --model "$model" --data "$data" --task "$2" --length "$3" --split "$4" --limit "$5" --seed 1 \
    --batch-size "$(batch "$tokens" "$3")" --dtype bfloat16 --out "$parts/$1.jsonl" "${chosen[@]}"
}

# Page sizes, shares and levels, from a tenth to a quarter of the keys.
shares=(luka_paper snapkv)
for top_k in 0.02 0.06 0.12; do shares+=("luka:page_size=16,top_k=$top_k"); done
for top_k in 0.04 0.08 0.12 0.17; do shares+=("luka:page_size=32,top_k=$top_k"); done
shares+=(luka:page_size=64,top_k=0.06 luka:page_size=64,top_k=0.18)
shares+=(luka:page_size=[16,64],top_k=0.12 luka:page_size=[16,128],top_k=0.12,expand=0.35)
shares+=(luka:page_size=[16,64,256],top_k=0.12,expand=0.35)

# One change each to one setting.
base=luka:page_size=16,top_k=0.12
rules=("$base" "$base,prior=0.0" "$base,prior=0.3" "$base,prior=0.7" "$base,window=16" "$base,window=256")
rules+=("$base,compressor=recent" "$base,compressor=recent,bias=log" "$base,compressor=random")
rules+=("$base,compressor=attention,temperature=1" "$base,compressor=attention")
rules+=("$base,score=summary" "$base,score=spread" "$base,score=bound" "$base,prior=0.0,score=summary")
rules+=("$base,prior=0.0,score=spread" "$base,prior=0.0,score=bound")
rules+=("$base,bias=none" "$base,bias=entropy" "$base,bias=log" "$base,zero_values=true" "$base,mass=preserve")
rules+=("$base,tail=256" "$base,sinks=0" "$base,pool=layer" "$base,segmenter=gaussian,page_deviation=4.0")
rules+=("luka:refine=top_p,max_refined=0.2" "luka:refine=threshold,epsilon=0.01")
rules+=('per_layer:layers={"0-1": "dense", "rest": "luka"}')

# The paper's three pages of 16.
three=(luka_paper)
for compressor in compressor=recent compressor=mean,bias=log compressor=mean,bias=spread; do
  for prior in 0.0 0.3 0.5; do
    three+=("luka:page_size=16,top_k=3,$compressor,prior=$prior")
    three+=("luka:page_size=16,top_k=3,$compressor,prior=$prior,score=spread")
  done
done

for length in 4096 8192 16384; do
  compare "shares-salad-$length" wikisalad_long "$length" dev 60 "${shares[@]}"
done
for length in 8192 16384; do
  compare "shares-needles-$length" niah "$length" multi 300 "${shares[@]}"
done
compare rules-salad-8192 wikisalad_long 8192 dev 60 "${rules[@]}"
compare rules-needles-8192 niah 8192 multi 300 "${rules[@]}"
compare three-salad-2048 wikisalad_long 2048 dev 60 "${three[@]}"
cat "$out"/luka-dev/*/*.jsonl > "$out/luka-dev.jsonl"
