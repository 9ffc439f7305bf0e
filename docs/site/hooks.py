"""Hooks of mkdocs: pages of the site that lie outside docs/, and links that leave docs/.

On the forge, README.md links to docs/page.md, and pages link to ../titan_ckpt/module.py. The site has README.md as
index.md beside the pages, and a copy of each source file that a page links to.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
AT_THE_TOP = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK_OUT = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository, and the files that pages link to."""
    linked = {name for page in files.documentation_pages() for name in LINK_OUT.findall(page.content_string)}
    for name in sorted({"LICENSE", *linked} - {*AT_THE_TOP.values()}):
        if (ROOT / name).is_file():  # the build names a link to any other
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for uri, name in AT_THE_TOP.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links of the repository into links of the site."""
    if page.file.src_uri in AT_THE_TOP:
        return re.sub(r"\]\(docs/", "](", markdown)
    return LINK_OUT.sub(lambda link: f"]({link[1]}", markdown).replace("](README.md", "](index.md")
