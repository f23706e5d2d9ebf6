"""What docs/guide/hooks.md says of caches, plans and operations is so: its tables are read, and each line is tried."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import foveate
from foveate import methods, ops
from foveate.lab.checks import tiny
from foveate.lab.recorded import record
from foveate.methods import Channel, KeepsByScore, Method, ReadsChosen, Replay, RowNumber
from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "hooks.md").read_text(encoding="utf-8")
TABLES = [
    [re.split(r" \| ", line.strip("| ")) for line in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
]
SITUATIONS = ("prompt", "decode", "captured")
TRIED = [row for table in TABLES for row in table if len(row) == 6]
"""An attribute in code, its value, what it is, and whether it is there in each situation."""
FOUND: dict[tuple[str, str], bool] = {}
"""By situation and attribute: whether it was there, and what the table says."""
DTYPES = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32, "bool": torch.bool}


_BASES = {f"`{one.__name__}`": one for one in (Method, KeepsByScore, ReadsChosen)}


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def rule(lengths):
    return lengths - 1


def decides(live, length):
    return live + length > 0


class Probe(Method):
    """Tries every line of the tables in each situation, and reads all keys."""

    name = "probe"
    replay = Replay()
    needs_prompt_end = True
    needs_rotary = True

    def channels(self, geometry):
        shape = (geometry.num_heads, geometry.head_dim)
        return {"per_slot": Channel(), "per_row": Channel(shape, per=0), "own": RowNumber()}

    def observe(self, cache, q, attended, scaling):
        self.tries("prompt", cache, scaling)

    def choose(self, cache, q, scaling):
        self.tries("captured" if cache.plan.captured else "decode", cache, scaling)

    def tries(self, situation, cache, scaling):
        names = {"cache": cache, "plan": cache.plan, "scaling": scaling, "rule": rule, "decides": decides}
        names["compute"] = lambda: 1
        shape = cache.geometry
        sizes = {"B": cache.batch_size, "Hq": shape.num_heads, "Hkv": shape.num_kv_heads, "D": shape.head_dim}
        sizes |= {"Dv": shape.value_dim, "used": cache.used}
        for attribute, value, *_ in TRIED:
            (expression,) = code(attribute)
            try:
                made = eval(expression, {}, names)
            except RuntimeError as error:
                made = error
            FOUND[situation, expression] = _fits(made, value, sizes, cache.dtype)


def _fits(made, value, sizes, dtype):
    """Whether something is what a cell of the table says: one of several shapes with a dtype, or of a type."""
    if made is None:
        return "or None" in value
    if isinstance(made, torch.Tensor):
        words = [word for word in DTYPES if re.search(rf"\b{word}\b", value)]
        wanted = [DTYPES[word] for word in words] or [dtype]
        shapes = [[sizes.get(size) or int(size) for size in one.strip("[]").split(", ")] for one in code(value)]
        return made.dtype in wanted and list(made.shape) in shapes
    kind = type(made).__name__
    return value == "any" or kind in re.findall(r"\w+", value)


@pytest.fixture(scope="module")
def found():
    """A batch of rows of unequal length whose steps are run, and one whose steps are captured."""
    methods.register(Probe)
    try:
        model, (ids, mask) = tiny(), (torch.randint(3, 300, (2, 40)), torch.ones(2, 40, dtype=torch.long))
        mask[0, :7] = 0
        how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for cuda_graph in (False, "auto"):
            with foveate.attached(model, "probe", dense_below=0, cuda_graph=cuda_graph) as attachment:
                attachment.graphs.recorder = record
                model.generate(ids, attention_mask=mask, **how)
        assert attachment.graphs.use.replayed
        return FOUND
    finally:
        del methods.REGISTRY["probe"]


@pytest.mark.parametrize("place", range(3))
def test_every_attribute_is_what_the_page_says(found, place):
    assert len(TRIED) > 35
    for attribute, _, _, *allowed in TRIED:
        (expression,) = code(attribute)
        assert allowed[place] in ("yes", "no")
        assert found[SITUATIONS[place], expression] == (allowed[place] == "yes"), (SITUATIONS[place], expression)


def test_every_name_on_the_page_is_there():
    """Also those in sentences, and the hooks."""
    kinds = {"cache": SlotCache, "plan": StepPlan, "ops": ops, "attended": ops.Attended, "choice": ops.Choice}
    spans = [span for cell in re.findall(r"`[^`\n]+`", PAGE) for span in code(cell)]
    tried = {code(row[0])[0] for row in TRIED}
    checked = 0
    for span in spans:
        for owner, name in re.findall(r"\b(cache|plan|ops|attended|choice)\.(\w+)", span):
            of_instance = any(one.startswith(f"{owner}.{name}") for one in tried)
            assert of_instance or hasattr(kinds[owner], name), span
            checked += 1
    assert checked > 60
    for name in re.findall(r"`(\w+)\(", "\n".join(row[0] for table in TABLES for row in table)):
        assert name in methods.__all__, name
    drawn = re.findall(r"(\w+)\(cache\b", "".join(re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)))
    assert len(drawn) == 8
    assert all(callable(getattr(Method, hook)) for hook in drawn)
    checks = re.findall(r"`(_check\w*)`", PAGE)
    assert len(checks) == 5
    assert all(callable(getattr(Method, one)) for one in checks)
    geometry = next(row[2] for row in TRIED if row[0] == "`cache.geometry`")
    assert all(hasattr(foveate.state.Geometry(4, 2, 8, 8), name) for name in code(geometry))


def test_hooks_have_the_arguments_of_the_page():
    described = [row[:2] for table in TABLES for row in table if len(row) == 3 and row[0] in _BASES]
    assert len(described) == 17
    for owner, hook in described:
        name, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", hook).groups()
        assert ["self", *arguments.split(", ")] == list(inspect.signature(getattr(_BASES[owner], name)).parameters)


def test_the_page_has_every_name_that_an_author_imports():
    """Together with the page that shows whole methods."""
    pages = PAGE + (Path(__file__).parents[1] / "docs" / "guide" / "extend.md").read_text(encoding="utf-8")
    assert [name for name in methods.__all__ if not re.search(rf"`{name}\b", pages)] == []
