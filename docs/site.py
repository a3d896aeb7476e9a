"""For mkdocs: the pages that lie outside docs/ become pages of the site, and links lead to them there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """`../SECURITY.md` of a page in docs/ is beside it on the site."""
    up = "../" * page.file.src_uri.count("/")
    for name, there in PAGES.items():
        markdown = re.sub(rf"\]\({re.escape(up)}\.\./{re.escape(name)}", f"]({up}{there}", markdown)
    return markdown
