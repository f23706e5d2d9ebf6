"""What the site shows otherwise than mkdocs would: references in docstrings as code alone, code in tables in lines."""

import re
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_INTERVAL = re.compile(r"(\[[-+\d.]+,) ([-+\d.]+\])")
_UNIT = re.compile(r"(?<=\d) (?=(?:[mµ]?s|[MG]B)\b|%)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):(<code[^>]*>)~?")


def on_page_content(html: str, **page: Any) -> str:
    """A page without the roles before names; tables as :func:`_table` has them."""
    return _TABLE.sub(_table, _ROLE.sub(r"\1", html))


def _table(table: re.Match[str]) -> str:
    """A table in whose cells a spec may break after what joins its parts, and intervals and units do not break off."""
    broken = _CODE.sub(lambda code: re.sub(r"([:,=_/])(?=\w|&)", r"\1<wbr>", code[0]), table[0])
    return _UNIT.sub("&nbsp;", _INTERVAL.sub(r"\1&nbsp;\2", broken))
