"""Reading JSON that anybody may have written."""

import json
from typing import Any

_DIGITS = 300
"""Of the longest integer that is read: no float holds a longer one."""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """As :func:`json.loads`, but what nothing can be done with is a :class:`json.JSONDecodeError`, too.

    That is a text nested too deeply, an integer of too many digits, and half of a character (a lone surrogate).
    """
    try:
        value = json.loads(text, parse_int=_integer, **options)
        if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeEncodeError:
        raise json.JSONDecodeError("half of a character, a lone surrogate", "", 0) from None
    return value


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise json.JSONDecodeError(f"an integer of {len(digits):,} digits", "", 0)
    return int(digits)
