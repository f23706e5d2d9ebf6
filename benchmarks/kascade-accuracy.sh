#!/usr/bin/env bash
# Kascade, its variants and the other query-aware methods on RULER's needles, questions over several passages and
# mathematics: what each keeps of dense attention's score at 10 % of the keys, and at 2.5 to 20 %.
#   benchmarks/kascade-accuracy.sh MODEL DATA [OUT_FOLDER] [TOKENS] [ITEMS]
# MODEL: a Hugging Face folder; DATA: a folder with ruler/, books/, multihop/ and aime/; TOKENS: of a batch, 1.2 million
# on 80 GB for half a billion parameters; ITEMS: of each RULER task at each length. Calibrates first (cell calibrate): as
# the paper does, on MuSiQue's train split, by tiles (paper.json) and by tokens (tokens.json); by divergence, on that and
# on RULER's multikey_2 with another seed than the one reported (divergence.json); and with anchors tried together at
# 8,192 tokens, five of them and ten (together-5.json, together-10.json); all in OUT_FOLDER/kascade-accuracy/MODEL, and a
# copy in OUT_FOLDER/calibrations/MODEL. Those not tried together in float32: rounding in bfloat16 is as large as small
# divergences. Writes OUT_FOLDER/kascade-accuracy.jsonl. CELLS: see luka-methods.sh, and calibrate or one of the
# calibrations' names.
# LESS=yes, for a larger model: shares other than a tenth at 8,192 tokens of RULER alone, and variants there and at the
# questions' own length.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$(realpath "$1") data=$(realpath "$2") tokens=${4:-1200000} items=${5:-67}
mkdir -p "${3:-runs}/kascade-accuracy/$(basename "$model")"
out=$(realpath "${3:-runs}")
source "$here/luka-methods.sh"
cd "$out/kascade-accuracy/$(basename "$model")" # specs name the calibrations as they are called here

calibrate() { # NAME ARGUMENT...
  wanted calibrate || wanted "$1" || return 0
  foveate calibrate --model "$model" --data "$data" --task musique --split train --out "$1.json" "${@:2}"
  mkdir -p "$out/calibrations/$(basename "$model")"
  cp "$1.json" "$out/calibrations/$(basename "$model")"
}
calibrate paper --by similarity --anchors 5 --limit 40 --dtype float32
calibrate tokens --by similarity --tile 1 --anchors 5 --limit 40 --dtype float32 # equation 3 as written: of every token
calibrate divergence --by divergence --anchors 5 --method kascade:pooling=post_softmax \
  --task ruler:split=niah_multikey_2,length=4096 --limit 20 --seed 1 --batch-size 20 --dtype float32
for anchors in 5 10; do # as long as the longest answers; what is won by moving one of ten is not worth its time
  calibrate "together-$anchors" --by together --anchors "$anchors" --rounds $((anchors < 10)) \
    --task ruler:split=niah_multikey_2,length=8192 --task ruler:split=niah_multikey_3,length=8192 \
    --answer-tokens 40 --limit 15 --seed 1 --batch-size 45 --dtype bfloat16
done

compare() { # NAME TASK SPLIT LIMIT LONGEST METHOD...
  local file
  wanted "$1" || return 0
  for file in $(printf '%s\n' "${@:6}" | grep -o '"[^"]*.json"' | tr -d '"' | sort -u); do
    [ -e "$file" ] || { echo "$PWD/$file is missing: CELLS=calibrate makes it" >&2; exit 1; }
  done
  mapfile -t chosen < <(methods dense "${@:6}")
  mapfile -t imports < <(imported "${@:6}")
  foveate compare --model "$model" --data "$data" --task "$2" --split "$3" --limit "$4" \
    --batch-size "$(batch "$tokens" "$5")" --dtype bfloat16 --out "$1.jsonl" "${imports[@]}" "${chosen[@]}"
}

by_similarity='kascade:calibration="paper.json",pooling=post_softmax'
by_tokens='kascade:calibration="tokens.json",pooling=post_softmax,pool=kv_head'
by_divergence='kascade:calibration="divergence.json",pooling=post_softmax'
paper="$by_similarity,pool=kv_head" heads="$by_divergence,pool=kv_head" # by KV head, as in the paper
ours="$by_divergence,pool=layer"
own=decode_only=false,dense_anchor_prefill=false # in prompts anchors read their own choice
five='kascade:calibration="together-5.json",pool=layer,pooling=sqrt'
ten='kascade:calibration="together-10.json",pool=layer,pooling=sqrt'
# At a tenth: the method with dense and with sparse prompts; what else there is; variants of it.
tenth=(
  "$five,decode_only=true" "$ten,decode_only=true" "$ten,$own" "$ten,decode_only=false"
  "$ours,decode_only=true" "$paper,decode_only=true" "$by_tokens,decode_only=true"
  oracle_topk:decode_only=true quest:top_k=0.1 omnikv lessismore:top_k=0.1 streaming:window=0.1 streaming:window=0.3
)
variants=(
  "$ours,$own" "$paper,$own" "$ours,$own,tile=32" "$heads,decode_only=true"
  "$heads,$own" kascade:anchors=5,pool=layer,pooling=post_softmax,decode_only=true
)
# Other shares for the frontier; a tenth is above.
shares=() oracle=() choices=() pooled=()
for share in 0.025 0.05 0.2; do
  shares+=("$ours,decode_only=true,top_k=$share" "$ours,top_k=$share,$own")
  shares+=("$paper,decode_only=true,top_k=$share" "$ten,decode_only=true,top_k=$share")
  shares+=("oracle_topk:decode_only=true,top_k=$share")
  shares+=("quest:top_k=$share" "omnikv:top_k=$share" "lessismore:top_k=$share" "streaming:window=$share")
done

swept=16384 all=yes
[ "${LESS:-}" != yes ] || swept=8192 all=
for length in 8192 16384 30720; do
  more=()
  [[ -z $all && $length != 8192 ]] || more+=("${variants[@]}")
  [ "$length" != "$swept" ] || more+=("${shares[@]}")
  for task in single_1 single_2 single_3 multikey_1 multikey_2 multikey_3; do
    compare "ruler-$task-$length" "ruler:length=$length" "niah_$task" "$items" "$length" "${tenth[@]}" "${more[@]}"
  done
done
for task in hotpotqa=200 2wiki=164; do # at their own length, and padded; 128 keys are more than a twentieth of the former
  name=${task%=*} limit=${task#*=}
  compare "$name-0" "$name:length=0" dev "$limit" 8192 "${tenth[@]}" "${variants[@]}"
  compare "$name-8192" "$name:length=8192" dev "$limit" 8192 "${tenth[@]}" ${all:+"${variants[@]}" "${shares[@]}"}
done
# Figures 2, 5 and 6 of the paper, with a floor that a share of a few thousand tokens does not reach. Mean queries, and
# heads without a map, are a method of methods/kascade_ablated.py.
for share in 0.025 0.05 0.1; do
  oracle+=("oracle_topk:top_k=$share,min_k=16" "oracle_topk:top_k=$share,min_k=16,dense_layers=0")
  for variant in "pool=kv_head,$own" "pool=layer,$own"; do
    choices+=("$by_divergence,top_k=$share,min_k=16,$variant" "$by_similarity,top_k=$share,min_k=16,$variant")
  done
  for name in divergence paper; do
    choices+=("kascade_ablated:calibration=\"$name.json\",top_k=$share,min_k=16,remap=false")
  done
done
for tile in 1 32 64 128 256; do
  pooled+=("oracle_topk:min_k=16,tile=$tile" "kascade_ablated:min_k=16,tile=$tile,pooling=pre_softmax")
done
compare figure-2 2wiki dev 164 8192 "${oracle[@]}"
compare figure-5 musique dev 200 8192 "${pooled[@]}"
compare figure-6 musique dev 200 8192 "${choices[@]}"

# Long answers, at a tenth and at a fifth.
long=(
  "$ten,decode_only=true" "$five,decode_only=true" "$ours,decode_only=true" "$paper,decode_only=true"
  "$heads,decode_only=true" quest:top_k=0.1 omnikv lessismore:top_k=0.1 streaming:window=0.3
)
longer=(
  "$ten,decode_only=true,top_k=0.2" "$ours,decode_only=true,top_k=0.2"
  quest:top_k=0.2 omnikv:top_k=0.2 lessismore:top_k=0.2
)
compare math500 math:max_new_tokens=1024 math500 100 4096 "${long[@]}"
compare math500-fifth math:max_new_tokens=1024 math500 100 4096 "${longer[@]}"
rows=("$out"/kascade-accuracy/*/*.jsonl)
[ ! -e "${rows[0]}" ] || awk '!seen[$0]++' "${rows[@]}" > "$out/kascade-accuracy.jsonl"
