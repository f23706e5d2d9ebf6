"""Tiny models for tests of training: a Llama, and one with retention scores, as a hybrid of learned eviction has."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 800,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": None,
}


class EvictingConfig(LlamaConfig):
    model_type = "evicting-for-tests"
    dropout = 0.1


class EvictingForCausalLM(LlamaForCausalLM):
    """A Llama whose two scorers weigh the embeddings they score; with dropout, whose seed resuming must know."""

    config_class = EvictingConfig

    def __init__(self, config):
        super().__init__(config)
        self.scorers = nn.ModuleList(nn.Linear(config.hidden_size, config.num_key_value_heads) for _ in range(2))
        for scorer in self.scorers:
            nn.init.constant_(scorer.bias, 0.5)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids=None, labels=None, output_retention=False, **rest):
        embedded = self.dropout(self.model.embed_tokens(input_ids))
        scores = [scorer(embedded).sigmoid() for scorer in self.scorers]
        weighed = embedded * torch.stack(scores).mean((0, -1))[..., None]
        made = super().forward(inputs_embeds=weighed, labels=labels, **rest)
        if output_retention:
            made["retention"] = tuple(score.transpose(1, 2).float() for score in scores)
        return made


AutoConfig.register(EvictingConfig.model_type, EvictingConfig)
AutoModelForCausalLM.register(EvictingConfig, EvictingForCausalLM)


def write_llama(folder):
    LlamaConfig(**SHAPE).save_pretrained(folder)
    return folder


def write_evicting(folder):
    EvictingConfig(**SHAPE).save_pretrained(folder)
    return folder
