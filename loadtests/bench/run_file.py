"""A run of the benchmark as a file, and the page that shows it.

`python -m loadtests.bench.run_file build/bench.json` makes that run the one of docs/evidence/performance.md.
"""

import dataclasses
import json
import sys
from pathlib import Path

from loadtests.bench import report
from loadtests.bench.figures import Figure
from loadtests.kit.routers import ROOT

DATA = ROOT / "docs" / "data" / "bench.json"
PAGE = ROOT / "docs" / "evidence" / "performance.md"
_BEGIN, _END = "<!-- tables of data/bench.json -->\n", "<!-- end of tables -->\n"


def as_json(run: report.Run) -> str:
    """A run as a file: what it was, and a line for each figure."""
    head = {name: getattr(run, name) for name in ("machine", "arguments", "missing", "about", "loads")}
    figures = ",\n".join(json.dumps(dataclasses.asdict(each)) for each in run.figures)
    return f'{json.dumps(head, indent=1)[:-2]},\n "figures": [\n{figures}\n]}}\n'


def from_json(text: str) -> report.Run:
    """The run in a file that `as_json` made."""
    read = json.loads(text)
    return report.Run(**read | {"figures": [Figure(**each) for each in read["figures"]]})


def page_with(run: report.Run, page: str) -> str:
    """The page with the tables of this run in the place of those it has."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{report.full(run, markdown=True)}\n\n{_END}{after}"


def main() -> int:
    """Take the file over into docs/. Returns the exit code."""
    text = Path(sys.argv[1]).read_text()
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(text)
    PAGE.write_text(page_with(from_json(text), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
