"""Imports run one way and in no circle, also in annotations and inside functions; no file has too many lines."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    ("errors",),
    ("io", "prompting"),
    ("ops",),
    ("csa", "state"),
    ("calibration",),
    ("methods",),
    ("runtime",),
    ("integrations",),
    ("planning",),
    ("cli",),
    ("__main__",),
    ("hybrids",),
    ("lab",),
)
"""Modules and folders of the package, the lowest first: each imports its own layer and those below.

The last two are the wings: what trains, and what measures. All else is the core.
"""

LAYERS_OF_OPS = (
    ("_math", "dispatch", "block_table", "checks", "kv", "logits", "rotary"),
    ("gpu",),
    ("score", "select", "attend", "compress", "retain", "fetch"),
    ("summaries",),
    ("choice",),
)
"""The same of ``foveate.ops``."""

LAYERS_OF_STATE = (
    ("counters", "description", "host_memory", "ranks", "step_plan"),
    ("device_rows", "eviction", "store", "transfers"),
    ("channels", "contiguous", "host_pages", "row_numbers"),
    ("snapshots",),
    ("cache",),
    ("borrowed", "engine_blocks", "packing"),
)
"""The same of ``foveate.state``."""

LAYERS_OF_LAB = (
    ("results", "recorded", "invariants"),
    ("evaluation",),
    ("report", "checks", "comparing"),
    ("bench",),
    ("cli", "lm_eval", "lm_eval_model", "stepping"),
)
"""The same of ``foveate.lab``."""

LAYERS_OF_HYBRIDS = (("state", "ops"), ("layers",), ("models",), ("training",), ("cli",))
"""The same of ``foveate.hybrids``."""

NEUTRAL = (
    *("errors", "io", "prompting", "ops", "csa", "state", "calibration", "methods"),
    *("runtime", "hybrids.state", "hybrids.ops", "hybrids.layers"),
)
"""Layers that know no engine."""

MOST_LINES = 450
"""A longer file has two subjects."""

MOST_PARAMETERS = 40
"""Of a kernel: beyond these it takes bundles, as of constants or of what is written together."""

MOST_ARGUMENTS = 32
"""A launch of a kernel with more hands over what belongs together: strides as tuples, operands and sizes in groups."""


def _files(root: Path) -> dict[str, Path]:
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of ``files`` that each of them imports, wherever in it the statement is.

    A package stands for its ``__init__``, and is imported by who takes a name from it that is no module.
    """
    found = {}
    for name, path in files.items():
        mine = found[name] = set()
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                mine |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                mine |= {one if (one := f"{base}.{alias.name}") in files else base for alias in node.names}
        found[name] = {one for one in mine if one in files and one != name}
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The sets of modules of which each reaches each other one (Tarjan 1972), sorted."""
    index, low, stack, open_ones, found = {}, {}, [], set(), []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        open_ones.add(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in open_ones:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            together, stack[place:] = stack[place:], []
            open_ones.difference_update(together)
            if len(together) > 1:
                found.append(sorted(together))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def imported_packages(text: str) -> set[str]:
    """The packages, ours or not, that a source imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


FILES = _files(ROOT / "foveate")


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules that each module of the package imports."""
    return imports_of(FILES)


def _upward(prefix: str, layers: tuple[tuple[str, ...], ...]) -> set[tuple[str, str]]:
    """Imports of a higher layer: the folder that has one, and the module that it imports, without ``prefix``."""
    layer_of = {name: place for place, names in enumerate(layers) for name in names}
    found = set()
    for name, others in graph().items():
        for other in others:
            if name.startswith(prefix) and other.startswith(prefix):
                mine, its = name.removeprefix(prefix), other.removeprefix(prefix)
                folder = mine.partition(".")[0]
                if layer_of[its.partition(".")[0]] > layer_of[folder]:
                    found.add((folder, its))
    return found


def test_imports_run_one_way():
    assert _upward("foveate.", LAYERS) == set(), "imports of a higher layer"


def test_operations_import_one_way():
    assert _upward("foveate.ops.", LAYERS_OF_OPS) == set()


def test_state_imports_one_way():
    assert _upward("foveate.state.", LAYERS_OF_STATE) == set()


def test_the_wings_import_one_way():
    assert _upward("foveate.lab.", LAYERS_OF_LAB) == set()
    assert _upward("foveate.hybrids.", LAYERS_OF_HYBRIDS) == set()


def test_operations_import_nothing_else_of_ours():
    others = {name for mine, names in graph().items() if mine.startswith("foveate.ops") for name in names}
    assert {name for name in others if not name.startswith("foveate.ops")} == set()


def test_nothing_up_to_the_runtime_imports_transformers():
    """A second engine stands on these layers; ``models`` are Transformers models and stand beside them."""
    names = [name for name in graph() if name.startswith(tuple(f"foveate.{folder}" for folder in NEUTRAL))]
    found = {name for name in names if "transformers" in imported_packages(FILES[name].read_text(encoding="utf-8"))}
    assert len(names) > 50
    assert found == set()
    assert {own for name in names for own in graph()[name] if own.startswith("foveate.hybrids.models")} == set()


def test_the_core_imports_no_wing():
    """As text, the entry of the command line names their commands, and the reader of model folders the models that
    Transformers knows by them alone."""
    wings = ("foveate.lab", "foveate.hybrids")
    core = {name: others for name, others in graph().items() if not name.startswith(wings)}
    assert len(core) > 150
    assert {name for name, others in core.items() if any(other.startswith(wings) for other in others)} == set()
    named = {name for name in core if re.search(r"""["']foveate\.(lab|hybrids)\b""", FILES[name].read_text("utf-8"))}
    assert named == {"foveate.cli", "foveate.integrations.transformers.model_folder"}


def test_what_trains_knows_nothing_of_what_measures():
    """Not even as text."""
    hybrids = {name: path.read_text("utf-8") for name, path in FILES.items() if name.startswith("foveate.hybrids")}
    assert len(hybrids) > 50
    assert {name for name, text in hybrids.items() if re.search(r"\bfoveate[./]lab\b", text)} == set()


def test_the_library_loads_no_wing():
    code = "import sys, foveate; [getattr(foveate, one) for one in foveate.__all__]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "foveate.methods" in loaded.split()
    assert [one for one in loaded.split() if one.startswith(("foveate.lab", "foveate.hybrids", "foveate.cli"))] == []


def test_there_are_no_circles():
    assert circles(graph()) == []


def test_no_file_is_long():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    found = {name for name, count in lines.items() if count > MOST_LINES}
    assert found == set(), f"more than {MOST_LINES} lines: split them by subject"


def loads_of(text: str) -> dict[str, set[str]]:
    """Where a source loads by one of Transformers' Auto classes, and the arguments that keep it from running code."""
    safe = {"trust_remote_code": False, "use_safetensors": True}
    found = {}
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            name = ast.unparse(call.func)
            if name.startswith("Auto") and call.func.attr in ("from_pretrained", "from_config"):
                values = {one.arg: getattr(one.value, "value", None) for one in call.keywords}
                kinds = {one for one, value in safe.items() if values.get(one) is value}
                if "gguf_file" in values or not name.startswith("AutoModel") or name.endswith("from_config"):
                    kinds.add("use_safetensors")  # there are no files to choose from
                found[f"{call.lineno}: {name}"] = safe.keys() - kinds
    return found


def test_what_is_loaded_runs_no_code():
    loads = {name: loads_of(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    assert sum(map(len, loads.values())) > 8
    assert {(name, where) for name, some in loads.items() for where, lacks in some.items() if lacks} == set()
    unsafe = "AutoModel.from_pretrained(a, trust_remote_code=True)\nAutoConfig.from_pretrained(a)\n"
    assert list(loads_of(unsafe).values()) == [{"trust_remote_code", "use_safetensors"}, {"trust_remote_code"}]


def launches_of(text: str) -> list[tuple[str, int]]:
    """The kernels that a source launches, ``kernel[grid](...)``, each with its number of written arguments."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)]
    return [(call.func.value.id, len(call.args) + len(call.keywords)) for call in calls]


def test_no_launch_has_many_written_arguments():
    """But those of Gluon, which has no tuples of arguments."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in FILES.items() if ".ops" in name}
    launches = {name: launches_of(text) for name, text in texts.items() if "import gluon" not in text}
    assert sum(map(len, launches.values())) > 40
    found = {(name, *launch) for name, some in launches.items() for launch in some if launch[1] > MOST_ARGUMENTS}
    assert found == set()


def test_no_kernel_has_many_parameters():
    kernels = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(one) for one in node.decorator_list):
                kernels[name, node.name] = len(node.args.args)
    assert len(kernels) > 80
    assert {kernel: number for kernel, number in kernels.items() if number > MOST_PARAMETERS} == {}


def test_written_arguments_are_counted_by_launch():
    text = "first[grid](a, *b, c=1, **d)\nsecond[2, 3](a)\nplain(a, b)\nsizes[0].clone()\n"
    assert sorted(launches_of(text)) == [("first", 4), ("second", 1)]


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "c", "c": "a", "d": "a"}, [["a", "b", "c"]]),
        ({"a": "bc", "b": "a", "c": "d", "d": "c"}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_circles_are_found_wherever_one_begins(edges, expected):
    for order in itertools.permutations(edges):
        assert circles({name: edges[name] for name in order}) == expected


def test_imports_are_found_wherever_they_are(tmp_path):
    """In annotations' imports, in functions, relative ones, of modules and of names."""
    (tmp_path / "own").mkdir()
    texts = {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from own.b import B\n",
        "b": "def f():\n    from own import a\n",
        "c": "from . import a\nfrom .b import B\nimport own.d\n",
        "d": "from own import NAME\n",
    }
    for name, text in texts.items():
        (tmp_path / "own" / f"{name}.py").write_text(text, encoding="utf-8")
    assert imports_of(_files(tmp_path / "own")) == {
        "own": set(),
        "own.a": {"own.b"},
        "own.b": {"own.a"},
        "own.c": {"own.a", "own.b", "own.d"},
        "own.d": {"own"},
    }


def test_packages_are_found_wherever_they_are_imported():
    text = (
        "import torch.nn\ndef f():\n    from transformers.cache_utils import DynamicCache\nfrom . import transformed\n"
    )
    assert imported_packages(text) == {"torch", "transformers"}
