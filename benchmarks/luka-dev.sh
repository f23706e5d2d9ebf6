#!/usr/bin/env bash
# Settings of LuKA side by side: how closely the predictions of each follow dense attention's, on items that no other
# file reports. What its defaults were chosen by, but for score=lowrank: pages are ranked by the spread of their keys here.
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
    --max-new-tokens 12 --fidelity --batch-size "$(batch "$tokens" "$3")" --dtype bfloat16 \
    --out "$parts/$1.jsonl" "${chosen[@]}"
}

# Levels, page sizes and shares, from a twentieth to a quarter of the keys.
luka=luka:score=spread
shares=(luka_paper "$luka" "$luka,top_k=0.12" snapkv:top_k=0.1 snapkv:top_k=0.25 h2o:top_k=0.25,window=64 tova:top_k=0.25)
for budget in 0.08,expand=0.25 0.06,expand=0.2 0.04,expand=0.15 0.02,expand=0.1 0.01,expand=0.06; do
  shares+=("$luka,top_k=$budget" "$luka,page_size=[16,64],top_k=$budget")
done
shares+=("$luka,page_size=[16,64],top_k=0.16" "$luka,page_size=[16,128],top_k=0.02,expand=0.1")
shares+=("$luka,page_size=[4,16],top_k=0.06,expand=0.2" "$luka,page_size=[8,32,128],top_k=0.12,expand=0.35")
shares+=("$luka,page_size=[8,32,128],top_k=0.04,expand=0.2" "$luka,page_size=[8,16,32],top_k=0.1,expand=0.4")
for top_k in 0.02 0.06 0.12; do shares+=("$luka,page_size=16,top_k=$top_k"); done
for top_k in 0.01 0.04 0.17; do shares+=("$luka,page_size=32,top_k=$top_k"); done

# One change each, with 12 % of the pages refined.
base=$luka,top_k=0.12 rules=("$luka,top_k=0.12")
for change in prior={0.0,0.3,0.7} window={1,4,64,256} compressor=attention \
  bias={none,entropy} mass=preserve tail={32,256} sinks={0,16} \
  pool=layer; do
  rules+=("$base,$change")
done
for change in "" ,prior=0.0; do rules+=("luka:top_k=0.12,score=summary$change"); done
rules+=("per_layer:layers={\"0-1\": \"dense\", \"rest\": \"$base\"}")
rules+=("per_layer:layers={\"0-1\": \"$luka,top_k=0.04,expand=0.2\", \"rest\": \"$base\"}")

# The paper's three pages of 16.
three=(luka_paper luka_paper:mass=exact,bias=entropy luka_paper:mass=exact,bias=log,pool=kv_head)
for score in summary spread; do
  for prior in 0.0 0.3 0.5; do
    three+=("luka:page_size=16,top_k=3,score=$score,prior=$prior")
  done
done

for length in 4096 8192 16384; do
  compare "shares-salad-$length" wikisalad_long "$length" dev 40 "${shares[@]}"
  compare "rules-salad-$length" wikisalad_long "$length" dev 40 "${rules[@]}"
done
compare shares-needles-16384 niah 16384 multi 200 "${shares[@]}"
compare rules-needles-16384 niah 16384 multi 200 "${rules[@]}"
compare three-salad-2048 wikisalad_long 2048 dev 60 "${three[@]}"
awk '!seen[$0]++' "$out"/luka-dev/*/*.jsonl > "$out/luka-dev.jsonl"
