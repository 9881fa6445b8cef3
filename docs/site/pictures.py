"""The sample report of the site and the picture of a report, as the pages show them.

    quiver compare quickstart --methods local,dfedpgp --set data.clients=10 \
      --set run.evaluate_every=5 --out runs/sample
    quiver compare quickstart --methods local,fedavg,dfedpgp --seeds 0,1,2,3,4 --out runs/demo
    PYTHONPATH=tests/support python docs/site/pictures.py runs/sample runs/demo

The picture needs a Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from browser import Browser

DOCS = Path(__file__).parents[1]
SAMPLE = DOCS / "start" / "sample-report.html"
PICTURE = DOCS / "images" / "report.png"
LARGEST = 400_000
"""Bytes of a sample that a page may ask its readers to load."""
ONE_SCREEN = """
for (const section of document.querySelectorAll('section'))
  if (!['results', 'curves'].includes(section.id)) section.remove();
const extras = 'nav, footer, details, .theme, figure button';
for (const part of document.querySelectorAll(extras)) part.remove();
for (const [id, end] of [['results', '.lead, p'], ['curves', '.panels']]) {
  const parts = [...document.getElementById(id).children];
  const wanted = parts.filter((part) => !part.matches('.lead, h3, h2'));
  const last = wanted.findIndex((part) => part.matches(end));
  const shown = wanted.slice(0, last + 1);
  for (const part of parts) if (!shown.includes(part)) part.remove();
  document.getElementById(id).style.marginTop = id === 'results' ? '28px' : '20px';
}
window.scrollTo(0, 0);
"""


def main(sample: Path, demo: Path) -> None:
    size = (sample / "report.html").stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{sample}/report.html has {size:,} bytes, more than {LARGEST:,}.")
    shutil.copyfile(sample / "report.html", SAMPLE)
    with tempfile.TemporaryDirectory() as scratch, Browser(Path(scratch)) as browser:
        browser.window(1180, 600)
        browser.open((demo / "report.html").resolve())
        browser.evaluate(f"(() => {{{ONE_SCREEN}}})()")
        browser.picture(PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
