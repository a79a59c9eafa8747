"""Foreign text made safe to look at."""

from __future__ import annotations

import re


def visible_text(text: str) -> str:
    r"""Return `text` with control characters and direction overrides as visible signs.

    Example:
        >>> visible_text("a\x1b[31m")
        'a␛[31m'
    """
    return _INVISIBLE.sub(lambda match: _sign(ord(match[0])), text)


# Controls, lone surrogates, line separators, and the marks that reorder the text around them.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
