#!/usr/bin/env bash
# The LuKA paper's ablations (figures 4, 5 and 6, the bias of a summary's logit, the fixed threshold) as perplexity on
# novels. What the package does not have is a method of benchmarks/methods/luka_ablated.py.
#   benchmarks/luka-perplexity.sh MODEL DATA [OUT_FOLDER] [ITEMS] [BATCH]
# MODEL: a Hugging Face folder; DATA: a folder with books/. Writes OUT_FOLDER/luka-perplexity.jsonl. CELLS: see
# luka-methods.sh.
#
# The paper reads one book of PG-19; here every item is a window of a novel, so that there are intervals. The prompt is
# one token: all tokens scored are decode steps, and pages are made on the way. The ablations of 512 tokens keep a tail
# of 16 tokens, as the published code does by default (with the 128 of the paper's task experiments there would be no
# page in the first 144); the modes keep 128, as the paper says of them. In float32, so that no difference is rounding.
set -euo pipefail
model=$1 data=$2 out=${3:-runs} items=${4:-24} batch=${5:-24}
source "$(dirname "$0")/luka-methods.sh"
parts=$out/luka-perplexity/$(basename "$model")
mkdir -p "$parts"

compare() { # NAME TOKENS METHOD...
  wanted "$1" || return 0
  mapfile -t chosen < <(methods dense "${@:3}")
  mapfile -t imports < <(imported "${@:3}")
  foveate compare --model "$model" --task "perplexity:continuation=$2" --data "$data" --length 1 \
    "${imports[@]}" --limit "$items" --batch-size "$batch" --dtype float32 --out "$parts/$1.jsonl" "${chosen[@]}"
}

# Figures 4 and 6: compressors by the share of pages refined, with the summaries' values and without. Masses are exact,
# as in the published code: only so does refining every page come to dense attention, as the figures say. Beside them
# equation 3 (mass=preserve), means with the first tokens kept raw (is it the attention sink that means lose?), and ours.
# The paper names no temperature; the committed rows have 1, luka_paper the 7 of the authors' evaluation.
luka=luka:page_size=16,score=spread # pages of 16, ranked by the spread of their keys
for share in 0 0.05 0.125 0.25 0.5 0.75 1.0; do
  paper=luka_ablated:tail=16,temperature=1,top_k=$share
  rows=("$paper" "$paper,mass=exact,compressor=mean,sinks=4" "$luka,tail=16,top_k=$share")
  rows+=("luka_paper:tail=16,mass=exact,top_k=$share")
  for compressor in mean attention random; do
    rows+=("$paper,mass=exact,compressor=$compressor" "$paper,mass=exact,compressor=$compressor,zero_values=true")
  done
  compare "compressors-$share" 512 "${rows[@]}"
done

# The bias: in the paper's method, and in ours with three pages a step and with an eighth of them (for which the default,
# bias=log, is among the rows above).
biases=()
for bias in none log entropy; do biases+=("luka_ablated:tail=16,temperature=1,bias=$bias"); done
for bias in none log entropy; do biases+=("$luka,tail=16,bias=$bias,top_k=3"); done
for bias in none entropy; do biases+=("$luka,tail=16,bias=$bias,top_k=0.125"); done
compare biases 512 "${biases[@]}"

# The other rule of section 3.2: the pages that hold more than a share of a head's attention. top_k, which it does not
# use, keeps these rows out of the pictures.
thresholds=()
for threshold in 0.2 0.05 0.01; do thresholds+=("luka_ablated:tail=16,mass=exact,top_k=1,threshold=$threshold"); done
compare thresholds 512 "${thresholds[@]}"

# Figure 5: the modes.
compare modes 1024 h2o h2o_as_published luka_paper luka:score=spread "$luka" \
  mixed:clustered=luka_paper 'mixed:clustered="luka:score=spread"'

# dense attention on the same 512 tokens is in every cell: its row is kept once
shopt -s nullglob
for folder in "$out"/luka-perplexity/*; do
  cat /dev/null "$folder"/{modes,biases}*.jsonl
  grep -hv '^{"method": "dense"' /dev/null "$folder"/{compressors,thresholds}*.jsonl || true
done > "$out/luka-perplexity.jsonl"
