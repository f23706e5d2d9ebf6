#!/usr/bin/env bash
# What each score of LuKA's pages misses at the same number of keys read; a quarter of an hour on one CPU core.
#   benchmarks/page-scores.sh MODEL DATA [OUT_FOLDER]
# MODEL: a Hugging Face folder; DATA: a folder with books/ and a SQuAD v2 dev file. Writes OUT_FOLDER/page-scores.jsonl.
set -euo pipefail
model=$1 data=$2 out=${3:-runs}
mkdir -p "$out/page-scores"
score() { PYTHONPATH=$(dirname "$0")/.. python -m benchmarks.page_scores "$model" "$data" --dtype bfloat16 "$@"; }
score --task niah:split=multi,length=4096 --task wikisalad_long:split=dev,length=4096,questions=1 --limit 6 \
  --out "$out/page-scores/4096.jsonl"
score --task niah:split=single,length=8192 --limit 3 --out "$out/page-scores/8192.jsonl"
awk '!seen[$0]++' "$out"/page-scores/*.jsonl > "$out/page-scores.jsonl"
