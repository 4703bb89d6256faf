"""Hooks of the site's build: README.md is its first page, and links out of docs/ become paths in the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page."""
    text = _LINK.sub(_from_root, (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace links to what is in the repository and not on the site.

    Raises:
        PluginError: there is no such file.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = (folder / target).resolve()
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: there is no {target}")
        if path.is_relative_to(ROOT / "docs") and path.suffix in (".md", ".png"):
            return f"[{text}]({target}{anchor})"
        name = f"`{path.relative_to(ROOT)}`"
        return name if text.strip("`") in str(path) else f"{text} ({name})"

    return _LINK.sub(replaced, markdown)


def _from_root(link: re.Match[str]) -> str:
    """A link of README.md as a page of docs/ would write it."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if re.match(r"[a-z]+:", target):
        return link[0]
    where = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
    return f"[{text}]({where}{anchor})"
