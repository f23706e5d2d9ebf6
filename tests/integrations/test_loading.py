import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.integrations.transformers.model_folder import model_digest, model_facts


def test_choices(tiny_folder, tmp_path):
    assert loading.choose_dtype("auto", tiny_folder, "cpu") == "float32"
    assert loading.choose_dtype("auto", tiny_folder, "cuda") == "float32"  # the checkpoint's own
    assert loading.choose_dtype("float16", tiny_folder, "cpu") == "float16"
    with pytest.raises(UserError, match=r"unknown dtype 'float61'\. Did you mean 'float16'"):
        loading.choose_dtype("float61", tiny_folder, "cpu")
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        loading.choose_device("gpu")


def test_folders_that_are_no_model(tiny_folder, tmp_path):
    for name, hint in (
        (tmp_path / "none", ""),
        ("none", ""),
        (tmp_path / "smollm2-135m", rf" \(foveate fetch smollm2-135m --out {tmp_path}/smollm2-135m makes one\)"),
        ("Qwen/Qwen3-8B", r" \(to use a model of the Hugging Face hub: hf download Qwen/Qwen3-8B --local-dir DIR, .*"),
    ):
        with pytest.raises(UserError, match=f"no such model folder{hint}$"):
            loading.load_model(Path(name), "float32", "cpu")
    with pytest.raises(UserError, match=r"not a model folder \(no config.json\)"):
        loading.load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="no weights"):
        loading.load_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="no usable tokenizer"):
        loading.load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="not loadable as a causal language model"):
        loading.load_model(tmp_path, "float32", "cpu")


@pytest.fixture
def copied(tiny_folder, tmp_path):
    """A copy of the tiny model's folder, to be damaged."""
    return shutil.copytree(tiny_folder, tmp_path / "copied")


def configure(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def refused(folder):
    with pytest.raises(UserError) as error:
        loading.load_model(folder, "float32", "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"num_hidden_layers": 3}, "9 missing from the files, such as model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "9 unknown to the model, such as model.layers.1.input_layernorm.weight"),
        (
            {"intermediate_size": 48},
            "6 of another shape, such as model.layers.0.mlp.down_proj.weight, [32, 64] and not [32, 48]",
        ),
        ({"attention_bias": True}, "8 missing from the files, such as model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_weights_that_are_not_those_of_the_configuration(copied, settings, fault):
    configure(copied, **settings)
    assert refused(copied) == f"{copied}: the weights are not those of config.json: {fault}"


def test_every_kind_of_strange_weights_is_named(copied):
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    weights["extra.weight"] = torch.zeros(2)
    weights["lm_head.weight"] = torch.zeros(3, 4)
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert refused(copied).endswith(
        "1 missing from the files, such as model.norm.weight; 1 unknown to the model, such as extra.weight; "
        "1 of another shape, such as lm_head.weight, [3, 4] and not [600, 32]"
    )


def test_weights_that_need_not_be_there_or_may_be_left_out(copied):
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # as older checkpoints have it
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    loading.load_model(copied, "float32", "cpu")
    configure(copied, tie_word_embeddings=True)
    del weights["lm_head.weight"]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    model = loading.load_model(copied, "float32", "cpu")
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("length", [0, 5, 1000, -1])
def test_a_truncated_file_of_weights_is_named(copied, length):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert refused(copied).startswith(f"{path}: a damaged file of weights (")


def test_a_shard_that_is_not_there(copied):
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    save_file(weights, copied / "model-00001-of-00002.safetensors", {"format": "pt"})
    places = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": places | {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(copied).endswith("names 'model-00002-of-00002.safetensors', which is missing")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", "{}", "expected an object with 'model' (object)"),
        ("tokenizer.json", "[]", "expected an object"),
        ("tokenizer.json", "{\n]", "malformed JSON, column 1"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("tokenizer_config.json", "{", "malformed JSON, column 2"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(copied, name, content, fault):
    (copied / name).write_text(content)
    with pytest.raises(UserError) as error:
        loading.load_tokenizer(copied)
    assert str(error.value).startswith(f"{copied / name}:")
    assert fault in str(error.value)


def test_a_tokenizer_that_nothing_can_be_made_of(copied):
    (copied / "tokenizer.json").write_text('{"model": {}, "added_tokens": []}')
    with pytest.raises(UserError, match="no usable tokenizer in the model folder"):
        loading.load_tokenizer(copied)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(LlamaConfig): model_type = "of_the_folder"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


def test_code_of_a_folder_does_not_run(copied, tmp_path, monkeypatch):
    """Also where someone at a terminal would have said yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (copied / "code.py").write_text(CODE.format(mark=str(mark := tmp_path / "ran")))
    autos = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    configure(copied, model_type="of_the_folder", auto_map=autos)
    assert "not loadable as a causal language model" in refused(copied)
    with pytest.raises(UserError, match="not the configuration of a known model"):
        model_facts(copied)
    configure(copied, model_type="llama")
    assert type(loading.load_model(copied, "float32", "cpu")).__module__ == "transformers.models.llama.modeling_llama"
    path = copied / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": [None, "code.Tokenizer"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Own", "auto_map": auto_map}))
    with contextlib.suppress(UserError):
        loading.load_tokenizer(copied)
    assert not mark.exists()


def test_an_index_stays_in_its_folder(copied, tmp_path):
    """Its files are loaded and digested where they are the folder's own."""
    weights = load_file(copied / "model.safetensors")
    shutil.copy(copied / "model.safetensors", outside := tmp_path / "outside.safetensors")
    (copied / "model.safetensors").rename(copied / "shard.safetensors")
    index = copied / "model.safetensors.index.json"

    def write(place):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, place)}))

    write("shard.safetensors")
    loading.load_model(copied, "float32", "cpu")
    digest = model_digest(copied)
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, copied / "shard.safetensors")
    assert model_digest(copied) != digest
    for name in ("../outside.safetensors", str(outside), "none/../../outside.safetensors"):
        write(name)
        assert refused(copied).endswith("outside the model folder")
    for content in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}', "[" * 9999):
        index.write_text(content)
        assert "not an index of weights" in refused(copied)


def test_the_weights_are_those_of_the_digest(copied):
    """Nothing is loaded that the digest does not cover, and nothing else counts in it."""
    whole = model_digest(copied)
    save_file({"unused": torch.zeros(2)}, copied / "other.safetensors")
    assert model_digest(copied) == whole
    loading.load_model(copied, "float32", "cpu")
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert "adapters are not loaded" in refused(copied)
    (copied / "adapter_config.json").unlink()
    configure(copied, transformers_weights="other.safetensors")
    assert "transformers_weights must not be set, got 'other.safetensors'" in refused(copied)
    configure(copied, transformers_weights=None)
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert "no weights in the model folder" in refused(copied)
    with pytest.raises(UserError, match="no weights in the model folder"):
        model_digest(copied)


def test_a_model_that_needs_what_is_not_installed_is_refused_in_a_sentence(tiny_folder, monkeypatch):
    def load(*given, **options):
        raise ImportError("Using `bitsandbytes` 4-bit quantization requires bitsandbytes\nand more")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(UserError, match=r"not loadable as a causal language model \(Using `bitsandbytes` .* requires"):
        loading.load_model(tiny_folder, "float32", "cpu")
