"""The pieces of code in docs/, for the tests that run them.

A fenced block that follows a comment such as `<!-- snippet: emacs chat -->` is the snippet of that name. What is not
named is not run: output, or one line that other tests cover.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
_SNIPPET = re.compile(r"<!-- snippet: ([^>\n]+) -->\n```[a-z]+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def snippets(page: str) -> dict[str, str]:
    """Every named snippet of docs/`page`, in order. Raises ValueError where a name comes twice or has no block."""
    text = (DOCS / page).read_text()
    found = _SNIPPET.findall(text)
    if len(found) != text.count("<!-- snippet:") or len(dict(found)) != len(found):
        raise ValueError(f"{page}: a snippet's name stands twice, or no fenced block follows it")
    return dict(found)
