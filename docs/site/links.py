"""A hook of MkDocs: what pages link to outside of docs/ goes along, so that the site stands by itself."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Each linked file of the repository is one of the site."""
    for page in list(files.documentation_pages()):
        for link, _ in LINK.findall(page.content_string):
            outside = _outside(page.src_uri, link)
            if outside is not None and files.get_file_from_path(_name(outside)) is None:
                files.append(File.generated(config, _name(outside), content=_text(outside)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links go there."""

    def there(link: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, link[1])
        if outside is None:
            return link[0]
        return f"]({relpath(_name(outside), Path(page.file.src_uri).parent.as_posix())}{link[2] or ''})"

    return LINK.sub(there, markdown)


def _outside(page: str, link: str) -> Path | None:
    """The path from the root of the repository, if that is where the link leads, and not to docs/."""
    target = (ROOT / "docs" / page).parent.joinpath(link).resolve()
    return None if target.is_relative_to(ROOT / "docs") else target.relative_to(ROOT)


def _name(outside: Path) -> str:
    """What it is called in the site. Browsers show text, and would save what they do not know."""
    return f"files/{outside}.txt"


def _text(outside: Path) -> str:
    path = ROOT / outside
    return "\n".join(sorted(p.name for p in path.iterdir())) if path.is_dir() else path.read_text()
