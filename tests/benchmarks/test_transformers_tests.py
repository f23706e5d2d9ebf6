"""Tests of Transformers' tests: a source tree with a mixin of the same shape, run with and without a method."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.transformers_table import table

pytestmark = pytest.mark.full  # two processes that load a model each

ROOT = Path(__file__).resolve().parents[2]
MIXIN = """
import unittest
import torch
from transformers import LlamaForCausalLM


class GenerationTesterMixin:
    def generate(self, **more):
        config, inputs = self.model_tester.config_and_inputs()
        self.model = LlamaForCausalLM(config).eval()
        return self.model.generate(**inputs, max_new_tokens=2, do_sample=False, **more)

    def test_passes(self):
        self.assertEqual(self.generate().shape, (2, 7))

    def test_is_refused(self):
        self.generate(cache_implementation="static")

    def test_passes_without_weights(self):
        self.generate(output_attentions=self.has_attentions)

    @unittest.skip("has its reason")
    def test_is_skipped(self):
        pass

    def test_fails_with_a_method(self):
        self.generate()
        self.assertFalse(hasattr(self.model, "foveate"), "attached")

    def test_fails_always(self):
        raise ValueError("not foveate's")
"""
TESTER = """
import torch
from transformers import LlamaConfig
from .generation.test_utils import GenerationTesterMixin


class CausalLMModelTester:
    use_input_mask = True

    def config_and_inputs(self):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
        config = LlamaConfig(**sizes, intermediate_size=32, vocab_size=50, attn_implementation="eager")
        return config, {"input_ids": torch.randint(3, 50, (2, 5))}


class CausalLMModelTest(GenerationTesterMixin):
    has_attentions = True

    def setUp(self):
        self.model_tester = CausalLMModelTester()

    def test_that_is_none_of_the_mixin(self):
        raise AssertionError
"""
MODEL = """
import unittest
from ...causal_lm_tester import CausalLMModelTest


class LlamaModelTest(CausalLMModelTest, unittest.TestCase):
    pass
"""
ASSERTION = (
    'AssertionError: True is not false : attached, at `self.assertFalse(hasattr(self.model, "foveate"), "attached")`'
)
FILES = {
    "src/transformers/__init__.py": '__version__ = "5.99.0"\n',
    "tests/generation/test_utils.py": MIXIN,
    "tests/causal_lm_tester.py": TESTER,
    "tests/models/llama/test_modeling_llama.py": MODEL,
    "tests/models/qwen3/test_modeling_qwen3.py": "import a_package_that_is_not_there\n",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The finished command and its rows, of a model whose tests can be imported and one whose tests cannot."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out") / "rows.jsonl"
    for name, text in FILES.items():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if name.startswith("tests/"):
            for folder in file.relative_to(tree).parents[:-1]:
                (tree / folder / "__init__.py").touch()
    what = ("--model", "llama", "--model", "qwen3", "--method", "unattached", "--method", "pages")
    command = [sys.executable, "-m", "benchmarks.transformers_tests", str(out), "--tests", str(tree), *what]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert out.exists(), run.stderr
    return run, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_every_test_of_the_mixin_ends_in_one_way(done):
    plain, attached = done[1]
    assert (plain["method"], attached["method"]) == ("unattached", "pages:top_k=1.0")
    mine = ["test_fails_with_a_method", "test_is_refused", "test_passes", "test_passes_without_weights"]
    assert plain["passed"] == mine
    assert attached["passed"] == mine[2:3]
    assert list(attached["refused"]) == [mine[1], mine[3]]
    assert attached["refused"][mine[1]].startswith("cache_implementation='static' cannot be combined")
    assert attached["failed"] == {**plain["failed"], mine[0]: ASSERTION}
    assert plain["failed"] == {"test_fails_always": "ValueError: not foveate's"}
    assert plain["skipped"] == attached["skipped"] == {"test_is_skipped": "has its reason"}
    assert attached["plain"]["passed"] == mine[3:]
    assert list(attached["plain"]["refused"]) == mine[1:2]


def test_rows_say_which_tests_ran(done):
    digest = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in FILES.items()}
    generation, model = (digest[name] for name in list(FILES)[1:4:2])
    assert [row["tests"] for row in done[1]] == [{"release": "5.99.0", "generation": generation, "model": model}] * 2


def test_the_command_ends_with_what_is_foveates_and_what_cannot_be_imported(done):
    run, _ = done
    unread, own = run.stderr.splitlines()[-2:]
    assert run.returncode == 1
    assert "test_modeling_qwen3.py: " in unread
    assert "No module named 'a_package_that_is_not_there'" in unread
    assert own == f"llama, pages:top_k=1.0, test_fails_with_a_method: {ASSERTION}"


def test_the_table_counts_tests_and_names_reasons(done):
    text = table(done[1])
    assert "| `unattached` | 4 of 5 |" in text
    assert "| `pages:top_k=1.0` | 1 (2) of 5 |" in text
    assert "| 0 | `test_is_refused` |" in text
