#!/usr/bin/env bash
# Choosing pages by low-rank summaries: what `pages`, `luka` and the anchors of `kascade_pages` keep of
# dense attention's score, beside LOCKS, Quest and the oracle, at an eighth of the keys; and `pages` at 2 to 25 %.
#   benchmarks/pages-accuracy.sh MODEL DATA [OUT_FOLDER] [TOKENS] [ITEMS]
# MODEL: a Hugging Face folder whose calibrations benchmarks/results has; DATA: a folder with ruler/, books/, multihop/ and
# wikisalad/ (docs/guide/data.md); TOKENS: of a batch, 1.2 million on 80 GB for half a billion parameters; ITEMS: of each RULER
# task at each length. Prompts are dense, so each is read once for all methods. The cells `settings-*` are of other task
# families than those reported: pages of 8 to 32 keys and one to four directions are compared there.
# Writes OUT_FOLDER/pages-accuracy.jsonl. CELLS: see luka-methods.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") tokens=${4:-1200000} items=${5:-67}
mkdir -p "${3:-runs}/pages-accuracy/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/pages-accuracy/$(basename "$model")" # specs name the calibrations as they are called here
cp "$here/results/calibrations/$(basename "$model")"/*.json .

compare() { # NAME LENGTH ARGUMENT... -- METHOD...
  local name=$1 length=$2 arguments=()
  shift 2
  wanted "$name" || return 0
  while [ "$1" != -- ]; do arguments+=("$1") && shift; done
  mapfile -t chosen < <(methods dense "${@:2}")
  foveate compare --model "$model" --data "$data" --batch-size "$(batch "$tokens" "$length")" --dtype bfloat16 \
    --out "$name.jsonl" "${arguments[@]}" "${chosen[@]}"
}

anchors=divergence
[ -e together-10.json ] && anchors=together-10
anchored="calibration=\"$anchors.json\",pool=layer,pooling=sqrt,decode_only=true,top_k=0.125"
eighth=(
  oracle_topk:top_k=0.125,decode_only=true
  pages:top_k=0.125 pages:top_k=0.125,page_size=16 pages:top_k=0.125,page_size=16,rank=4
  pages:top_k=0.125,page_size=32,rank=4 pages:top_k=0.125,rank=4
  locks:top_k=0.125 quest:top_k=0.125
  luka luka:score=spread luka:page_size=16
  "kascade:$anchored" "kascade_pages:$anchored" "kascade_pages:$anchored,first_layer=pages"
  "kascade_pages:$anchored,page_size=16" "kascade_pages:$anchored,first_layer=pages,page_size=16"
)
shapes=(pages:top_k=0.125 pages:top_k=0.125,rank=1 pages:top_k=0.125,rank=4 locks:top_k=0.125)
shapes+=(pages:top_k=0.125,page_size=16,weighted=false)
for page in page_size=16 page_size=16,rank=1 page_size=16,rank=4 page_size=32 page_size=32,rank=4; do
  shapes+=("pages:top_k=0.125,$page")
done
finer=(pages:top_k=0.125,page_size=4,rank=1 pages:top_k=0.125,page_size=4 pages:top_k=0.1875)
frontier=()
for share in 0.02 0.05 0.25; do
  frontier+=("oracle_topk:top_k=$share,decode_only=true" "pages:top_k=$share" "locks:top_k=$share" "quest:top_k=$share")
done

compare settings-musique 4096 --task musique --split train --limit 60 -- "${shapes[@]}"
compare settings-vt 4096 --task ruler --split vt --length 4096 --limit "$items" --seed 1 -- "${shapes[@]}"
for length in 4096 8192 16384; do
  for split in niah_multikey_1 niah_multikey_2 niah_multikey_3; do
    more=()
    [ "$length" = 8192 ] && more=("${frontier[@]}")
    [ "$split" = niah_multikey_3 ] && more+=("${finer[@]}")
    compare "$split-$length" "$length" --task ruler --split "$split" --length "$length" --limit "$items" -- \
      "${eighth[@]}" "${more[@]}"
  done
done
compare hotpotqa 4096 --task hotpotqa --limit 200 -- "${eighth[@]}"
compare 2wiki 4096 --task 2wiki --limit 164 -- "${eighth[@]}"
compare wikisalad 4096 --task wikisalad --split hard --limit 100 -- "${eighth[@]}"
cat ../*/*.jsonl > "$out/pages-accuracy.jsonl"
