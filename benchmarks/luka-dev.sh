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

# Page sizes and shares, means and attention-weighted summaries.
shares=(luka_paper h2o snapkv)
for page_size in 16 32 64; do
  for top_k in 0.06 0.12 0.15 0.18; do
    [[ $page_size != 16 || $top_k != 0.18 ]] || continue # more than a quarter of the keys
    shares+=("luka:page_size=$page_size,top_k=$top_k")
    shares+=("luka:page_size=$page_size,top_k=$top_k,compressor=attention,temperature=1")
  done
done
shares+=(
  luka:page_size=[16,64],top_k=0.12 luka:page_size=[16,128],top_k=0.06 luka:page_size=[16,128],top_k=0.12,expand=0.35
  luka:page_size=[32,256],top_k=0.12,expand=0.35 luka:page_size=[16,64,256],top_k=0.06
  'per_layer:layers={"0-1": "dense", "rest": "luka:page_size=32,top_k=0.12"}'
)

# One change each to one setting.
base=luka:page_size=32,top_k=0.12
rules=("$base" "$base,tail=256" "$base,sinks=0" "$base,mass=preserve" "$base,pool=layer")
for bias in none log entropy; do rules+=("$base,bias=$bias"); done
rules+=("$base,score=summary" "$base,score=summary,bias=log" "$base,score=bound" "$base,score=bound,bias=log")
rules+=("$base,compressor=random" "$base,compressor=attention" "$base,zero_values=true")
rules+=("$base,segmenter=gaussian,page_deviation=8.0" "$base,segmenter=kl")
rules+=(luka:page_size=32,refine=top_p,top_p=0.8,max_refined=0.25 luka:page_size=32,refine=top_p,top_p=0.9,max_refined=0.25)
rules+=(luka:page_size=32,refine=threshold,epsilon=0.01 luka:page_size=32,refine=missed_mass,max_refined=0.15)

# The paper's three pages of 16.
three=(luka_paper)
for compressor in compressor=mean compressor=attention,temperature=1 compressor=attention,temperature=7; do
  for bias in none log entropy spread; do three+=("luka:page_size=16,top_k=3,$compressor,bias=$bias"); done
  three+=("luka:page_size=16,top_k=3,$compressor,score=summary")
done

for length in 8192 16384; do
  compare "shares-salad-$length" wikisalad_long "$length" dev $((8192 * 60 / length)) "${shares[@]}"
  compare "shares-needles-$length" niah "$length" multi $((8192 * 300 / length)) "${shares[@]}"
done
compare rules-salad-8192 wikisalad_long 8192 dev 60 "${rules[@]}"
compare rules-needles-8192 niah 8192 multi 300 "${rules[@]}"
compare three-salad-2048 wikisalad_long 2048 dev 60 "${three[@]}"
cat "$out"/luka-dev/*/*.jsonl > "$out/luka-dev.jsonl"
