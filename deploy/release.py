"""`python -m deploy.release vX.Y.Z --source URL --notes FILE`: prepares the sources for a release.

The tag, `cellgate.VERSION` and the changelog must agree, and a wheel of the sources must start where no extra
is installed (deploy/first_start.py). The notes are the changelog's section. Where the repository is goes into
the project's URLs, into the links of the README, which a package shows elsewhere, and into the runbooks'
addresses in the alerts: nothing else knows it.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.first_start import FirstStartError, start_wheel

ROOT = Path(__file__).resolve().parents[1]
_URLS = """
[project.urls]
Source = "{source}"
Documentation = "{source}/tree/{tag}/docs"
Changelog = "{source}/blob/{tag}/CHANGELOG.md"
Issues = "{source}/issues"
"""
_DOCS = "https://cellgate.example/docs/"
"""Stands for the pages of docs/ in deploy/monitoring, until a release says where they are."""


class ReleaseError(Exception):
    """The sources are not those of a release. `str()` is one line that says what to do."""


def main() -> int:
    """Prepare, or say what keeps it from being a release."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("tag", metavar="vX.Y.Z")
    parser.add_argument("--source", required=True, metavar="URL", help="where the repository is")
    parser.add_argument("--notes", required=True, type=Path, metavar="FILE", help="where the notes go")
    args = parser.parse_args()
    try:
        told = notes((ROOT / "CHANGELOG.md").read_text(), version(args.tag))
        started(start_wheel)
        args.notes.write_text(told)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for name, change in _CHANGES.items():
        file = ROOT / name
        file.write_text(change(file.read_text(), args.source.rstrip("/"), args.tag))
    return 0


def started(start: Callable[[], None]) -> None:
    """Starts the wheel of the sources. Raises ReleaseError when a new user could not."""
    try:
        start()
    except FirstStartError as error:
        raise ReleaseError(f"this version does not start where it is new: {error}") from None


def version(tag: str) -> str:
    """The version that the tag names. Raises ReleaseError when the sources have another one."""
    from cellgate import VERSION

    if tag != f"v{VERSION}":
        raise ReleaseError(f"the tag is {tag}, but cellgate.VERSION is {VERSION}: set it, or tag v{VERSION}")
    return VERSION


def notes(changelog: str, version: str) -> str:
    """The section of a version. Raises ReleaseError when there is none with a date."""
    found = re.search(
        rf"^## {re.escape(version)} - (\S+)\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## {version} - DATE': add it")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise ReleaseError(
            f"CHANGELOG.md says '{version} - {found[1]}': give the section its date, YYYY-MM-DD"
        )
    return found[2].strip() + "\n"


def with_urls(project: str, source: str, tag: str) -> str:
    """pyproject.toml with the project's URLs, before the next table."""
    place = project.index("\n[project.optional-dependencies]")
    return project[:place] + _URLS.format(source=source, tag=tag) + project[place:]


def with_links(readme: str, source: str, tag: str) -> str:
    """The README with links, and pictures, that lead to the repository from anywhere."""
    pictures = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{source}/raw/{tag}/", readme)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{source}/blob/{tag}/", pictures)


def with_runbooks(rules: str, source: str, tag: str) -> str:
    """The alerts with runbooks of this release."""
    return rules.replace(_DOCS, f"{source}/blob/{tag}/docs/")


_CHANGES = {
    "pyproject.toml": with_urls,
    "README.md": with_links,
    "deploy/monitoring/rules.yaml": with_runbooks,
    "deploy/helm/files/rules.yaml": with_runbooks,
}

if __name__ == "__main__":
    sys.exit(main())
