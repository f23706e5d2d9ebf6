"""A tiny random Llama with a byte-level tokenizer of its own, saved as a Hugging Face folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SAMPLE = Path(__file__).parents[1] / "examples" / "data"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
)


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 600 tokens, trained on a piece of the sample novel; no token is put before a text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|bos|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([(SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8")[:40_000]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def build(folder: Path, seed: int = 0, positions: int = 2048, layers: int = 2) -> Path:
    """Saves model and tokenizer to `folder` and returns it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    # As many published models do, it asks for sampling and penalties; evaluation must not listen.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.9, eos_token_id=1, pad_token_id=0
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def chapter(folder: Path, length: int = 16_000) -> Path:
    """Saves so many characters of the sample novel to `folder`, whose whole takes long to tokenize, and returns it."""
    folder.mkdir()
    text = (SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8")[20_000 : 20_000 + length]
    (folder / "chapter.txt").write_text(text, encoding="utf-8")
    return folder
