"""Models that Transformers spreads over processes."""

import pytest
import torch
import transformers

import foveate
from tests.ranks import run_ranks


def refused(folder):
    torch.distributed.init_process_group("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    assert model.tp_size == 2
    with pytest.raises(ValueError, match=r"heads are spread over 2 processes, .* load it without tp_plan"):
        foveate.attach(model, "kascade:anchors=1")
    ids = torch.arange(3, 20)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)  # it was left as it was


def test_a_model_whose_heads_are_spread_over_processes_is_refused(tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64, pad_token_id=0, **heads
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    run_ranks(2, refused, tmp_path / "model", folder=tmp_path)
