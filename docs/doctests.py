"""For mkdocstrings: examples in docstrings, and trees, are shown as code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> )\S.*\n?)*)+", re.MULTILINE)
TREE = re.compile(r"^\w+\n(?:[├└│ ].*\n?)+", re.MULTILINE)


class Fences(griffe.Extension):
    """Markdown would take `>>>` for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            fenced = EXAMPLE.sub(lambda found: f"\n```python\n{found[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = TREE.sub(lambda found: f"\n```text\n{found[0].rstrip()}\n```\n", fenced)
