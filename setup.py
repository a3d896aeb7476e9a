"""The README as an index page shows it: its links into the repository lead nowhere there, so they become plain names."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")

setup(
    long_description=LINK.sub(
        lambda link: f"{link[1]} (`{link[2]}`)" if link[2] not in link[1] else f"`{link[1]}`", README
    ),
    long_description_content_type="text/markdown",
)
