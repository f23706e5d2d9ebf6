"""What the site shows otherwise than mkdocs would: references in docstrings, which name a kind, are code alone."""

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod|obj):(<code[^>]*>)~?")


def on_page_content(html: str, **page: Any) -> str:
    """A page without the roles before names."""
    return _ROLE.sub(r"\1", html)
