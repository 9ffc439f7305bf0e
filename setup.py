"""The description of the package: README.md with names of pages instead of links, which lead nowhere on an index.

The wheel has those pages (`data-files` in pyproject.toml).
"""

import re
from pathlib import Path

from setuptools import setup


def _name(link: re.Match[str]) -> str:
    text, page = link.groups()
    return text if text == page else f"{text} ({page})"


readme = Path(__file__).with_name("README.md").read_text()
without_pictures = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", readme)
setup(
    long_description=re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", _name, without_pictures),
    long_description_content_type="text/markdown",
)
