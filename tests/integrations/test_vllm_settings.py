"""What a user of vLLM configures, and what is refused at start by its name; without vLLM."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from foveate.integrations.vllm import releases, settings
from foveate.integrations.vllm.builder import keys_and_values, largest_graph
from foveate.integrations.vllm.settings import (
    Asked,
    asked_of,
    check_audit,
    check_early,
    check_engine,
    check_lossless,
    check_options,
    layer_methods,
    served,
    settings_of,
    wants_lossless,
)
from foveate.methods import make
from foveate.state import Geometry
from tests.helpers import CONFIGS

KASCADE = "kascade_paper:top_k=0.1,anchors=[0,2],decode_only=true"
OF_HEADS = 'kascade_paper:anchors=[0,2],heads={"1": [1, 0]},decode_only=true'


def engine(spec=KASCADE, **changes):
    """The parts of vLLM's configuration that are read, of a tiny Llama."""
    config = SimpleNamespace(
        additional_config={"foveate": spec},
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        model_config=SimpleNamespace(
            model="nowhere",
            use_mla=False,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            dtype=torch.bfloat16,
            hf_text_config=CONFIGS["llama"](),
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            use_ubatching=False,
            rank=0,
        ),
    )
    for path, value in changes.items():
        *parts, last = path.split("__")
        place = config
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
    return config


@pytest.mark.parametrize(("most", "largest"), [(12, 8), (3, 2), (16, None), (64, 24), (1, None)])
def test_batches_that_are_larger_than_any_graph_are_named(most, largest, caplog):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=most),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24]),
    )
    found = largest_graph(config)
    assert found == (largest or most) == largest_graph(config), "of another group of layers"
    said = f"no CUDA graph of batches of more than {largest} requests, which are dense: give {largest} as"
    assert caplog.text.count("no CUDA graph") == (largest is not None)
    assert largest is None or said in caplog.text
    caplog.clear()
    config.compilation_config.cudagraph_capture_sizes = []  # eager
    assert largest_graph(config) == 0
    assert caplog.text == ""


def test_another_layout_of_memory_is_refused():
    impl = SimpleNamespace(num_kv_heads=2, head_size=16)
    k, v = keys_and_values(impl, torch.empty(5, 2, 8, 32))
    assert k.shape == v.shape == (5, 2, 8, 16)
    for shape in ((5, 8, 2, 32), (2, 5, 8, 2, 16), (5, 2, 8, 16)):
        with pytest.raises(ValueError, match=r"expected keys and values as \[blocks, 2, tokens, 32\], and vLLM gives"):
            keys_and_values(impl, torch.empty(shape))


@pytest.mark.parametrize("given", [KASCADE, {"method": KASCADE}, "file"])
def test_a_method_is_named_in_one_of_three_ways(given, monkeypatch, tmp_path):
    if given == "file":
        given = str(tmp_path / "foveate.json")
        (tmp_path / "foveate.json").write_text(json.dumps({"method": KASCADE}), encoding="utf-8")
    monkeypatch.delenv("FOVEATE_METHOD", raising=False)
    found = settings_of({"foveate": given})
    assert (found.method.anchors, found.dense_below) == ((0, 2), "auto")
    if isinstance(given, str):
        monkeypatch.setenv("FOVEATE_METHOD", given)
        assert settings_of({}) == settings_of(None) == found
    assert settings_of({"foveate": "dense"}).method.name == "dense"


def test_settings_beside_a_file_replace_its_own(tmp_path):
    path = str(tmp_path / "foveate.json")
    (tmp_path / "foveate.json").write_text(json.dumps({"method": KASCADE, "dense_below": 7}), encoding="utf-8")
    assert settings_of({"foveate": path}).dense_below == 7
    assert settings_of({"foveate": {"method": path, "dense_below": 9}}).dense_below == 9


def test_what_is_dense_below_can_be_set():
    assert settings_of({"foveate": {"method": "dense", "dense_below": 99}}).dense_below == 99


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "is the attention backend, but has no method: name a method with"),
        ("kaskade", "did you mean 'kascade'"),
        ("kascade:topk=3", "has no setting 'topk'"),
        ("nowhere/foveate.json", "nowhere/foveate.json: No such file"),
        (
            {"method": "dense", "dense_bellow": 3},
            "unknown setting 'dense_bellow'; there are method, dense_below, audit",
        ),
        ({"method": "dense", "dense_below": -1}, "dense_below must be a number of tokens"),
        ({"method": "dense", "audit": 1.5}, "audit must be a share of the decode steps, 0 to 1, not 1.5"),
        ({"method": "dense", "audit": True}, "audit must be a share of the decode steps, 0 to 1, not True"),
        ({"dense_below": 3}, "expected a method"),
        (["dense"], "expected a method"),
    ],
)
def test_settings_that_are_none(given, why, monkeypatch):
    monkeypatch.delenv("FOVEATE_METHOD", raising=False)
    with pytest.raises(ValueError, match=why):
        settings_of({"foveate": given})


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "foveate.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"foveate\.json: malformed JSON"):
        settings_of({"foveate": str(tmp_path / "foveate.json")})


def test_a_setting_that_tune_found_for_another_model_is_refused(tmp_path):
    found = {"kind": "foveate_setting", "schema": 2, "method": "pages", "architecture": {"layers": 99}}
    found |= {"objective": "memory", "max_loss": 1.0, "measured": {}}
    (tmp_path / "foveate.json").write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ValueError, match=r"pages was found by foveate tune for a model of layers 99, and this one has"):
        served(engine(str(tmp_path / "foveate.json")))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "speculative decoding by eagle: give one of ngram, draft_model, or leave --speculative-config",
        ),
        (
            {"cache_config__cache_dtype": "fp8_e5m2"},
            "--kv-cache-dtype fp8_e5m2 for a model in bfloat16: give auto, fp8 or fp8_e4m3",
        ),
        ({"cache_config__calculate_kv_scales": True}, "--calculate-kv-scales, .*: leave it out"),
        ({"cache_config__cache_dtype": "float16"}, "--kv-cache-dtype float16 for a model in bfloat16: give auto"),
        ({"model_config__use_mla": True}, "MLA models.*: serve the model without foveate"),
        ({"model_config__is_mm_prefix_lm": True}, "prefixes .*: serve the model without foveate"),
        ({"model_config__runner_type": "pooling"}, "pooling models.*: serve the model without foveate"),
        (
            {"parallel_config__pipeline_parallel_size": 2},
            r"pipeline parallelism \(--pipeline-parallel-size 2\).*: give --tensor-parallel-size instead",
        ),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            r"decode context parallelism \(--decode-context-parallel-size 2\).*: leave it out",
        ),
    ],
)
def test_what_an_engine_is_asked_and_foveate_cannot(changes, why):
    check_engine(engine())
    check_engine(engine(cache_config__cache_dtype="bfloat16"))
    check_engine(engine(cache_config__cache_dtype="fp8"))
    with pytest.raises(ValueError, match=f"foveate does not support {why}"):
        check_engine(engine(**changes))


@pytest.mark.parametrize("heads", ["[0, 1, 1]", "[0]", "[0, 2]"])
def test_heads_that_the_model_does_not_have_are_refused_before_weights_are_loaded(heads):
    with pytest.raises(ValueError, match="heads of layer 1 must be 2 numbers below 2, one for each KV head, not"):
        check_early(engine(OF_HEADS.replace("[1, 0]", heads)))


@pytest.mark.parametrize("method", [None, "", *settings.SPECULATION])  # "": vLLM finds it out
def test_drafters_beside_which_foveate_is_tested_are_served(method):
    check_options(Asked(speculation=method))


def test_other_drafters_are_refused():
    with pytest.raises(ValueError, match=r"speculative decoding by eagle: give one of ngram, draft_model, or leave"):
        check_options(Asked(speculation="eagle"))
    with pytest.raises(ValueError, match=r'a draft model with "attention_backend": "CUSTOM"'):
        check_options(Asked(speculation="draft_model", drafts_by_foveate=True))
    with pytest.raises(ValueError, match="audit with speculative decoding, whose steps are dense"):
        check_audit(Asked(speculation="ngram"))


LOSSLESS = {"speculation": "draft_model", "drafts_by_itself": True, "draft_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speculation": None}, "drafts of another model, or none: serve by `foveate serve --lossless 8`"),
        ({"speculation": "ngram"}, "drafts of another model, or none"),
        ({"drafts_by_itself": False}, "drafts of another model, or none"),
        ({"draft_tokens": 17}, "drafts of 17 tokens: give 1 to 16"),
        ({"first_runner": True}, "model runner V1: set VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"lora": True}, "LoRA, .*: leave --enable-lora out"),
        ({"second_reads_more": True}, "a model that reads more than tokens"),
        ({"recurrent": True}, "recurrent layers, whose states drafts would advance"),
        ({"kv_transfer": True}, "a KV connector"),
        ({"data_parallel_size": 2}, "data parallelism"),
    ],
)
def test_where_foveate_does_not_draft(changes, why):
    check_lossless(Asked(**LOSSLESS), {})
    with pytest.raises(ValueError, match=f"foveate does not support lossless decoding with {why}"):
        check_lossless(Asked(**LOSSLESS | changes), {})


@pytest.mark.parametrize(("spec", "why"), [("lessismore", "it copies the keys"), ("h2o", "it evicts tokens")])
def test_methods_that_do_not_draft(spec, why):
    with pytest.raises(ValueError, match=rf"does not support lossless decoding by {spec} \(layer 3\): {why}"):
        check_lossless(Asked(**LOSSLESS), {3: make(spec)})
    check_lossless(Asked(**LOSSLESS), {3: make("kascade"), 4: make("pages:weighted=false")})


def test_an_engine_s_own_drafts_are_known():
    """By the model that it is given as its draft model; without them it is refused before weights are loaded."""
    given = {"method": KASCADE, "lossless": True}
    drafts = SimpleNamespace(method="draft_model", model="a/model", num_speculative_tokens=4)
    custom = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"))
    how = {"attention_config": custom, "load_config": SimpleNamespace(download_dir=None)}
    how |= {"model_config__model": "a/model", "model_config__revision": None}
    config = engine(given, speculative_config=drafts, use_v2_model_runner=True, **how)
    asked = asked_of(config)
    assert (asked.drafts_by_itself, asked.draft_tokens, asked.first_runner, asked.lora) == (True, 4, False, False)
    assert wants_lossless(config)
    assert not wants_lossless(engine(**how))
    custom.backend.name = "FLASH_ATTN"
    assert not wants_lossless(config), "settings of a backend that is not used"
    drafts.model = "another/model"
    assert not asked_of(config).drafts_by_itself


def test_a_file_that_the_environment_names_may_ask_for_drafts(tmp_path, monkeypatch):
    (path := tmp_path / "foveate.json").write_text(json.dumps({"method": KASCADE, "lossless": True}), encoding="utf-8")
    monkeypatch.setenv("FOVEATE_METHOD", str(path))
    custom = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"))
    assert wants_lossless(SimpleNamespace(additional_config={}, attention_config=custom))


def test_a_model_is_the_same_by_its_name_and_by_the_folder_that_the_hub_keeps(tmp_path, monkeypatch):
    """vLLM replaces the one by the other where it is offline."""
    (cached := tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(settings, "try_to_load_from_cache", lambda name, *more, **where: str(cached))
    drafts = SimpleNamespace(method="draft_model", model="a/model", num_speculative_tokens=4)
    how = {"load_config": SimpleNamespace(download_dir=None), "model_config__revision": None}
    config = engine(speculative_config=drafts, model_config__model=str(tmp_path), **how)
    assert asked_of(config).drafts_by_itself


def test_whether_to_draft_is_true_or_false():
    with pytest.raises(ValueError, match="lossless must be true or false, not 8; vLLM's num_speculative_tokens is the"):
        settings_of({"foveate": {"method": KASCADE, "lossless": 8}})


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("h2o", r"h2o evicts tokens.*; kascade and pages:weighted=false are served"),
        ("kascade_paper:anchors=[0,2]", "add decode_only=true"),
        ("quest", "keeps state beside the keys"),
        ("pages", "requests share blocks: add weighted=false"),
        ("luka", "keeps state beside the keys"),
        ("kascade_paper:anchors=[0,7],decode_only=true", "not 7"),
    ],
)
def test_methods_that_cannot_be_served_are_refused_before_weights_are_loaded(spec, why):
    check_early(engine())
    with pytest.raises(ValueError, match=why):
        check_early(engine(spec))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_transfer_config": object()}, "a KV connector or KV offloading"),
        ({"parallel_config__use_ubatching": True}, "microbatches"),
    ],
)
def test_blocks_that_would_come_without_their_summaries_are_refused(changes, why):
    check_early(engine(**changes))
    check_early(engine("pages:weighted=false"))
    with pytest.raises(ValueError, match=f"foveate does not support pages with {why}"):
        check_early(engine("pages:weighted=false", **changes))


@pytest.mark.filterwarnings("ignore:calibration .* holds no weights")
def test_a_calibration_of_another_model_is_refused(tmp_path):
    facts = {"model_type": "llama", "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 16, "weights": []}
    found = {"anchors": [0, 2], "heads": {"1": [1, 0]}, "model": facts, "found": {}}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"kind": "foveate calibration", "schema": 1, **found}), encoding="utf-8")
    spec = f"kascade:calibration={json.dumps(str(path))},decode_only=true"
    check_early(engine(spec))
    other = copy.deepcopy(CONFIGS["llama"]())
    other.model_type = "qwen2"
    with pytest.raises(ValueError, match="is for a model with model_type 'llama'"):
        check_early(engine(spec, model_config__hf_text_config=other))


@pytest.mark.parametrize("spec", [OF_HEADS, "pages:weighted=false"])
def test_more_ranks_than_kv_heads_are_refused_where_each_kv_head_chooses(spec):
    for ranks in (1, 2):
        check_early(engine(spec, parallel_config__tensor_parallel_size=ranks))
    with pytest.raises(ValueError, match=r"chooses for each of the 2 KV heads, .* parallelism of 4 .*take 2 ranks"):
        check_early(engine(spec, parallel_config__tensor_parallel_size=4))
    check_early(engine("kascade:anchors=[0,2]", parallel_config__tensor_parallel_size=4))


def test_layers_that_the_method_is_not_applied_to_are_not_counted():
    """Of six layers two have sliding windows: anchors by number are those of the model."""
    method = settings_of({"foveate": "kascade_paper:anchors=2,decode_only=true"}).method
    found = layer_methods(method, dict.fromkeys((1, 2, 4, 5), Geometry(4, 2, 8, 8)), {"layers": 6, "kv_heads": 2})
    assert {layer: own.role.name for layer, own in found.items()} == {
        1: "choosing",
        2: "reading",
        4: "choosing",
        5: "reading",
    }


@pytest.mark.parametrize(("version", "found"), [("0.32.0", "0.32"), ("0.26.1+cu130", "0.26"), ("0.33.0rc1", "0.33")])
def test_release_lines(version, found):
    assert releases.line(version) == found


@pytest.mark.parametrize(("version", "ok"), [("0.26.0", True), ("0.33.2", True), ("0.25.0", False), ("0.34.0", False)])
def test_releases_that_are_not_supported_are_refused(version, ok, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if ok:
        return releases.check()
    with pytest.raises(ValueError, match=rf"supports vLLM 0\.26, 0\.32, 0\.33, and this is {version}"):
        releases.check()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(
            (
                {"use_v2_model_runner": True, f"model_config__{name}": True},
                "model runner V2 for a model that reads more than tokens: set VLLM_USE_V2_MODEL_RUNNER=0",
            )
            for name in ("is_multimodal_model", "enable_prompt_embeds")
        ),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"kv_transfer_config": object()}, "a KV connector"),
        ({"model_config__is_hybrid": True}, "recurrent layers"),
        ({"model_config__has_inner_state": True}, "recurrent layers"),
    ],
)
def test_where_a_step_cannot_be_run_twice_audits_are_refused(changes, why):
    check_early(engine(**changes))
    check_early(engine({"method": KASCADE, "audit": 0.1}, use_v2_model_runner=True))
    with pytest.raises(ValueError, match=f"foveate does not support audit with {why}"):
        check_early(engine({"method": KASCADE, "audit": 0.1}, **changes))


def test_foveate_is_imported_without_vllm_and_metrics():
    program = "import sys; sys.modules['vllm'] = sys.modules['prometheus_client'] = None; import foveate"
    program += "; import foveate.integrations.vllm.plugin, foveate.integrations.vllm.metrics"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
