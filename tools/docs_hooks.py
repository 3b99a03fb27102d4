"""Hooks of the documentation's build (mkdocs.yml): CONTRIBUTING.md of the repository becomes a page of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def contributing_page() -> str:
    """CONTRIBUTING.md with links as they are from within docs/."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to those of docs/ (MkDocs calls this before it reads any)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "contributing.md", content=contributing_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to that page as the site has them; in the repository they lead to the file."""
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md")
