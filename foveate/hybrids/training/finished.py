"""A trained model as a Transformers folder: configuration, tokenizer and weights."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from foveate.hybrids.training.tokens import TOKENIZER
from foveate.io import outfile


def describe(network: nn.Module, text: Path, folder: Path) -> None:
    """Write a model's configuration and its tokenizer, which the folder of tokenised text holds, into a folder."""
    config = copy.deepcopy(network.config)
    config.architectures, config.dtype = [type(network).__name__], "float32"
    config.save_pretrained(folder)
    for path in sorted((text / TOKENIZER).iterdir()):
        shutil.copyfile(path, folder / path.name)


def write(final: Path, network: nn.Module, weights: Mapping[str, Tensor], text: Path, max_shard_size: str) -> None:
    """Write the finished model, without what only training needs, in one step.

    Args:
        final: the model's folder, which is replaced.
        weights: on the host, by name.
        text: folder of the tokenised text, which holds the tokenizer.
        max_shard_size: largest size of a file, such as ``5GB``.

    Raises:
        UserError: when the folder cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    folder = final.parent / ".unfinished-model"
    with outfile.writing(final):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        describe(network, text, folder)
        save_torch_state_dict(weights, folder, max_shard_size=max_shard_size)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(folder, final)
