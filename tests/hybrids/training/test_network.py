"""The model of a run: its configuration with changes, and which models heed a sparsity budget."""

import pytest
from transformers import Qwen2Config

from foveate.errors import UserError
from foveate.hybrids.models import make_config
from foveate.hybrids.training import network
from foveate.hybrids.training.configuration import ModelSettings
from foveate.hybrids.training.loop import train

LALTE = {"preset": "lalte", "size": "tiny"}


def test_changes_of_a_preset_are_those_of_its_configuration():
    config = network.configuration(ModelSettings(**LALTE, changes={"mixers": ["gdn", "gdn", "lte", "attn"]}))
    assert config.mixers == ["gdn", "gdn", "lte", "attn"]
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    config = network.configuration(ModelSettings(**LALTE, changes={"mixers": ["attn"]}))
    assert config.mixers == ["attn"] * 4


def test_changes_of_a_folder_make_its_configuration_anew(tmp_path):
    make_config("lalte", "tiny").save_pretrained(tmp_path)
    config = network.configuration(ModelSettings(folder=tmp_path, changes={"mixers": ["attn"], "lte_window": 20}))
    assert config.mixers == ["attn"] * 4
    assert config.layer_types == ["full_attention"] * 4
    assert config.lte_window == 20
    assert config.hidden_size == make_config("lalte", "tiny").hidden_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 3}, "'hidden' is no field of a hybrid's configuration"),
        ({"mixers": ["gdn", "lte", "gdn"]}, "mixers has 3 entries, which do not repeat evenly over 4 layers"),
        ({"to_dict": 3}, "'to_dict' is no field"),
    ],
)
def test_changes_that_are_refused(tmp_path, changes, message):
    make_config("lalte", "tiny").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"model: {message}"):
        network.configuration(ModelSettings(**LALTE, changes=changes))
    with pytest.raises(
        UserError, match=r"model.changes.(hidden|to_dict): .* no such field|model.changes: mixers has 3"
    ):
        network.configuration(ModelSettings(folder=tmp_path, changes=changes))


def test_changes_that_another_models_configuration_refuses(tmp_path):
    Qwen2Config(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.changes: .* `num_hidden_layers` \(2\) must be equal to .*\(4\)"):
        network.configuration(ModelSettings(folder=tmp_path, changes={"num_hidden_layers": 2}))


def test_an_unknown_preset_is_refused():
    with pytest.raises(UserError, match=r"model: preset must be one of transformer, gdn, .*, not 'latte'"):
        network.configuration(ModelSettings(preset="latte", size="tiny"))


def test_positions_of_a_preset_are_those_trained_on():
    built = network.build(ModelSettings(**LALTE), 600, 1, 64, 0).config
    assert (built.max_position_embeddings, built.vocab_size, built.eos_token_id) == (64, 600, 1)
    built = network.build(ModelSettings(**LALTE, changes={"max_position_embeddings": 99}), 600, 1, 64, 0).config
    assert built.max_position_embeddings == 99


def test_a_budget_that_no_layer_heeds_is_refused_before_anything_is_written(make, values, tmp_path):
    del values["model"]["folder"]
    changes = {"model.preset": "gdn_swa", "model.size": "tiny", "sparsity.budget": 9}
    with pytest.raises(
        UserError, match=r"sparsity.budget is 9, and no layer .*: its mixers are gdn, swa; set sparsity"
    ):
        train(make(changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_layers_that_evict_without_a_budget_are_said_once(make, values, tmp_path):
    del values["model"]["folder"]
    said = []
    note = "sparsity.budget is none: nothing keeps the tokens few that the lte layers retain"
    for budget, count in ((None, 1), (9, 0)):
        changes = {"model.preset": "lalte", "model.size": "tiny", "model.changes": {"vocab_size": 800}, "steps": 1}
        said.clear()
        train(make({**changes, "sparsity.budget": budget}), tmp_path / f"run-{count}", say=said.append)
        assert said.count(note) == count
