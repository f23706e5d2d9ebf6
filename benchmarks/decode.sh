#!/usr/bin/env bash
# Decoding beside FlashAttention-3 and cuDNN: attention of a layer (8K to 128K tokens, 1 to 64 sequences), a layer with its
# cache (32K tokens), and steps of whole models (2K to 131K tokens, with and without Liger's kernels). Needs a GPU,
# pip install tokenspeed-fa3==3.0.0.post20260810 (FlashAttention-3) and liger-kernel. Rows are kept as they come, and those
# of other cases stay.
#   benchmarks/decode.sh MODEL runs/decode.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?MODEL: a folder, such as of Qwen2.5-Coder-1.5B-Instruct} out=${2:?OUT: a file of rows}
dense_prompt=kascade:pool=kv_head,pooling=post_softmax few=luka:page_size=16,top_k=3,score=spread paper=luka:page_size=16,top_k=3,score=summary,prior=0.0
by_pages=${dense_prompt/kascade:/kascade_pages:}
step() { python -m benchmarks.layer decode "$@" --out "$out"; }
whole() { foveate bench decode-model "$@" --out "$out"; }
step --batch 1 --batch 32 --method "$dense_prompt" --method "$by_pages" --method "$by_pages,first_layer=pages" \
  --method "$by_pages,page_size=16" --method "$by_pages,first_layer=pages,page_size=16" --method "$paper" \
  --method "$few" --method luka --method luka:score=spread --method luka:page_size=16 \
  --method pages:top_k=0.1 --method pages:top_k=0.1,page_size=16 --method pages:top_k=0.1,page_size=32 --method locks:top_k=0.1 \
  --method quest --method omnikv --method lessismore
step --batch 64 --method "$dense_prompt" --method "$dense_prompt,top_k=0.2" --method "$dense_prompt,top_k=0.3" \
  --method "$by_pages" --method "$by_pages,first_layer=pages" \
  --method "$by_pages,page_size=16" --method "$by_pages,first_layer=pages,page_size=16" \
  --method pages:top_k=0.1 --method pages:top_k=0.1,page_size=16 --method locks:top_k=0.1
step --level layer --context 32768 --batch 1 --batch 32 --method "$dense_prompt" --method "$few" --method luka \
  --method luka:score=spread --method luka:page_size=16 --method pages:top_k=0.1 --method quest --method omnikv --method lessismore --method h2o \
  --method streaming --method snapkv --method tova
# LuKA's figure 3: Qwen3-0.6B at 2K tokens, beside the same layers with nothing refined.
alone=score=summary,prior=0.0,top_k=0
step --context 2048 --batch 1 --heads 16 --layers 28 --method luka --method "luka:page_size=32,$alone" --method "$paper" \
  --method "luka:page_size=16,$alone" --method luka_paper --method luka_paper:top_k=0
for liger in "" --liger; do
  whole --context 131000 --rounds 3 --method "$dense_prompt" --method "$dense_prompt,decode_only=false" --method "$paper" --method "$few" \
    --method luka --method luka:score=spread --method h2o --method streaming $liger
done
whole --context 8192 --context 16384 --context 32768 --method "$dense_prompt" --method "$few" \
  --method luka --method luka:score=spread
whole --context 2048 --context 32768 --rounds 3 --dense-below auto --method "$dense_prompt" --method "$few" \
  --method luka --method luka:score=spread --method quest --method omnikv --method lessismore --method h2o --method tova \
  --method snapkv --method streaming
whole --model "$model" --context 30000 --batch 16 --method "$dense_prompt" --method "$few" --method luka
