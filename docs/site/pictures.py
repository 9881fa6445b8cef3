"""The sample report of the site, the picture of a report and that of the README.

    quiver compare quickstart --methods local,fedavg,dfedpgp --seeds 0-2 \
      --set data.clients=10 --set run.evaluate_every=6 --out runs/sample
    quiver compare quickstart --methods local,fedavg,dfedpgp --seeds 0-4 --out runs/demo
    PYTHONPATH=tests/support python docs/site/pictures.py runs/sample runs/demo

The picture needs a Chromium.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from browser import Browser

DOCS = Path(__file__).parents[1]
SAMPLE = DOCS / "start" / "sample-report.html"
PICTURE = DOCS / "images" / "report.png"
FIRST = DOCS / "images" / "first-screen.png"
"""The way of a round above a report: the one picture of the README."""
ROUND = DOCS / "images" / "round.svg"
LARGEST = 600_000
"""Bytes of a sample that a page may ask its readers to load; a seventh of it as servers send it."""
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
document.body.style.paddingBottom = '1rem';
window.scrollTo(0, 0);
"""
WITH_ROUND = """
const words = '#results p, .eyebrow, .facts, .legend';
for (const part of document.querySelectorAll(words)) part.remove();
const style = document.body.style;
style.padding = '1.2rem 2.6rem .4rem';
const title = document.querySelector('h1');
title.style.fontSize = '1.3rem';
title.style.maxWidth = 'none';
title.append(' · 20 clients, 60 rounds, 5 seeds, test accuracy in %');
document.querySelector('header').style.marginTop = '1.4rem';
document.getElementById('results').style.marginTop = '14px';
const drawing = document.createElement('div');
drawing.innerHTML = ROUND;
drawing.firstElementChild.style.cssText = 'display: block; width: 100%; height: auto';
document.body.prepend(drawing);
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
        browser.window(1000, 600)
        drawing = json.dumps(ROUND.read_text(encoding="utf-8"))
        browser.evaluate(f"(() => {{const ROUND = {drawing};{WITH_ROUND}}})()")
        browser.picture(FIRST)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
