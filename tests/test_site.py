"""What `make docs` stages: pages in the layout of the checkout, what they link to, and the reference's names.

mkdocs itself, which refuses broken links, runs in `make docs` alone.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import foveate
from foveate import lab, methods

ROOT = Path(__file__).resolve().parents[1]


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = module_of("docs_site")
    made.STAGED = tmp_path_factory.mktemp("docs")
    made.stage()
    return made


def test_all_that_a_page_links_to_is_staged(site):
    pages = [page for page in site.STAGED.rglob("*.md") if page.parent.name != "api"]
    assert {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")} <= {
        page.relative_to(site.STAGED) for page in pages
    }
    missing = []
    for page in pages:
        targets = list(site.links(page.read_text(encoding="utf-8")))
        missing += [(page.name, one) for one in targets if not (page.parent / one).is_file()]
    assert missing == []


def test_a_folder_that_a_page_links_to_lists_its_files(site):
    text = (site.STAGED / "benchmarks" / "results" / "calibrations" / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "benchmarks" / "results" / "calibrations").iterdir() if path.is_file()]
    assert all(f"- [{name}]({name})" in text for name in files)


def test_the_reference_has_every_public_name(site):
    for package, names in (("foveate", foveate.__all__), ("foveate.lab", lab.__all__)):
        text = (site.STAGED / "api" / f"{package}.md").read_text(encoding="utf-8")
        listed = {
            *re.findall(rf"^::: {package}\.(\w+)$", text, re.MULTILINE),
            *re.findall(r"^`(\w+)`: ", text, re.MULTILINE),
        }
        assert listed == set(names)
    assert set(site.public("foveate.methods")) == set(methods.__all__)


def test_every_page_of_the_navigation_is_staged(site):
    named = re.findall(
        r"- (?:[\w ]+: )?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [one for one in named if not (site.STAGED / one).is_file()] == []
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(named)


def test_code_has_no_links(site):
    text = "[a](b.md#c) `[x](y.md)`\n```\n[z](w.md)\n```\n[s](https://e.org) [h](#here)"
    assert list(site.links(text)) == ["b.md"]


def test_lists_begin_after_a_blank_line(site):
    assert site.spaced("Text:\n- a\n  more\n- b\n\n```\nx\n- y\n```") == (
        "Text:\n\n- a\n    more\n- b\n\n```\nx\n- y\n```"
    )
    assert site.spaced("- a\n\n  ```\n  x\n    y\n  ```\n  - c") == "- a\n\n    ```\n    x\n      y\n    ```\n    - c"


def test_code_in_tables_breaks_between_the_parts_of_a_spec():
    hooks = module_of("docs_hooks")
    page = "<code>a:b=c</code> [-1, +2]<table><td><code>pages:top_k=0.1</code> x:y [-1, +2] 3.5 ms, 20 %</td></table>"
    spec = "<code>pages:<wbr>top_<wbr>k=<wbr>0.1</code>"
    broken = f"<code>a:b=c</code> [-1, +2]<table><td>{spec} x:y [-1,&nbsp;+2] 3.5&nbsp;ms, 20&nbsp;%</td></table>"
    assert hooks.on_page_content(page) == broken


def test_roles_of_docstrings_are_not_shown():
    hooks = module_of("docs_hooks")
    assert hooks.on_page_content("see :func:<code>~foveate.attach</code>.") == "see <code>foveate.attach</code>."
