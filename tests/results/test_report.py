"""The report: everything in it, nothing it needs from outside, nothing it lets in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.results import figures
from quiverfl.results.curves import curve_chart, is_cut, make_curves, visible_range
from quiverfl.results.groups import group_runs
from quiverfl.results.report.clients import client_table
from quiverfl.results.report.html import Markup, join_markup, tag
from quiverfl.results.report.page import list_notes, write_report
from quiverfl.results.run_files import find_runs
from run_folders import ALONE, STAR, Recipe, write_comparison, write_exact, write_run

SECTIONS = ("results", "curves", "clients", "data", "graph", "mass", "configuration")


def report(*folders: Path, stage: str = "local") -> str:
    out = folders[0].parent / f"{folders[0].name}-{stage}.html"
    write_report(folders, out, stage)
    return out.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Elements, ids, addresses and the text that can be read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("style", "script")
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                self.addresses.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = write_comparison(tmp_path_factory.mktemp("runs") / "all", (0, 1), rounds=4, clients=6)
    return folder, report(folder)


def test_all_sections_are_there_and_the_contents_lead_to_them(
    comparison: tuple[Path, str],
) -> None:
    page = Page(comparison[1])
    for name in SECTIONS:
        assert name in page.ids
        assert f"#{name}" in page.addresses
    # Curves against three costs and of the loss, clients: two stages each; two partitions, three
    # graphs, μ and consensus distance; the labels of six clients.
    assert page.tags.count("svg") == 2 * 4 + 2 + 2 + 3 + 2 + 6


def test_the_table_says_which_accuracy_it_is(comparison: tuple[Path, str]) -> None:
    text = Page(comparison[1]).text
    for words in (
        "Last round, accuracy in %",
        "Test accuracy at stages “local” (right after local training, before communication) and "
        "“mixed” (right after communication), of the last evaluated round",
        "the unweighted mean over clients",
        "± is the standard deviation over seeds",
        "Best round",
        "Mean of the last ten evaluated rounds",
        "Difference to DFedPGP, paired by seed",
        "Mean over clients of the test accuracy and loss, each on its own data. Lines are means "
        "over seeds, bands reach from the lowest seed to the highest.",
    ):
        assert words in text


def test_options_the_configuration_left_out_are_shown_too(comparison: tuple[Path, str]) -> None:
    """The summary knows all options of the method, config.json those that were written."""
    assert re.search(r"<h3>method</h3>.*?epochs</th><td>5</td>", comparison[1])


def test_methods_whose_mass_or_distance_cannot_be_drawn_are_named(
    comparison: tuple[Path, str],
) -> None:
    text = Page(comparison[1]).text
    assert "μ stays 1, or is not used: Local, FedAvg." in text
    assert "The shared parts are equal after every round: FedAvg." in text


def test_nothing_is_loaded_from_anywhere(comparison: tuple[Path, str]) -> None:
    _, text = comparison
    page = Page(text)
    assert "://" not in text
    assert all(address.startswith(("#", "data:image/")) for address in page.addresses)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in text
    assert "default-src 'none'" in text
    for reach in ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "sendBeacon", "eval("):
        assert reach not in text


def scripts(text: str) -> tuple[str, list[str]]:
    """The script of the page, and the data it reads."""
    found = re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    data = [content for attributes, content in found if attributes == ' type="application/json"']
    (script,) = (content for attributes, content in found if not attributes)
    assert len(data) + 1 == len(found)
    return script, data


def test_the_page_may_run_its_own_script_and_no_other(comparison: tuple[Path, str]) -> None:
    _, text = comparison
    script, _ = scripts(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "unsafe-eval" not in text


def test_the_charts_hold_what_the_files_say(tmp_path: Path) -> None:
    """Rounds from one, the mean over clients, the range of the seeds."""
    write_exact(tmp_path / "all" / "a", "fedavg", 0, [[0.2, 0.4], [0.5, 0.7]], [[0.1, 0.1]] * 2)
    write_exact(tmp_path / "all" / "b", "fedavg", 1, [[0.4, 0.4], [0.7, 0.9]], [[0.1, 0.1]] * 2)
    groups = group_runs(find_runs([tmp_path / "all"]))
    chart = curve_chart(groups, "local", "rounds", "accuracy")
    (series,) = chart["series"]
    assert chart["x"]["title"] == "rounds"
    assert series["label"] == "FedAvg"
    assert series["x"] == [1, 2]
    assert series["y"] == [0.35, 0.7]
    assert series["low"] == [0.3, 0.6]
    assert series["high"] == [0.4, 0.8]


def test_scales_follow_the_later_rounds_where_that_tells_more(tmp_path: Path) -> None:
    """From 20 % to 94 and 98: on a scale from 20 to 98 nobody sees which is which."""
    for method, last in (("fedavg", 0.94), ("local", 0.98)):
        course = [[0.2, 0.2], [0.8, 0.8], *[[last, last]] * 8]
        write_exact(tmp_path / "all" / method, method, 0, course, course)
    groups = group_runs(find_runs([tmp_path / "all"]))
    drawn = make_curves(groups, "local", "rounds", "accuracy")
    assert is_cut(drawn)
    assert visible_range(drawn) == (0.94, 0.98)
    draw = partial(figures.draw_curves, groups=groups, stage="local", late=True)
    axes = figures.make_figure(draw).axes[0]
    assert axes.get_ylim() == pytest.approx((0.938, 0.982))
    assert curve_chart(groups, "local", "rounds", "accuracy")["cut"]


def test_who_is_worst_off_comes_first_with_the_data(tmp_path: Path) -> None:
    last = [[0.9, 0.3, 0.6, float("nan")]]
    write_exact(tmp_path / "run", "dfedpgp", 0, last, last)
    counts = np.array([[5, 0], [0, 7], [2, 2], [1, 0]])
    np.savez(tmp_path / "run" / "partition.npz", train_counts=counts, names=["a", "b", "c", "d"])
    text = client_table(group_runs(find_runs([tmp_path / "run"])), ("local", "mixed"))
    rows = re.findall(r'<tr><th scope="row">(.)</th>.*?</tr>', text)
    assert rows == ["b", "c", "a", "d"], "who has no test data is compared with nobody"
    assert "<title>class 0: 2, class 1: 2</title>" in text
    (people,) = re.findall(r"<script[^>]*>(.*?)</script>", text)
    view = json.loads(people)["views"][0]
    assert [client["name"] for client in view["clients"]] == rows
    assert [client["train"] for client in view["clients"]] == [7, 4, 5, 1]
    assert view["experiments"][0]["scores"]["local"] == [0.3, 0.6, 0.9, None]


def test_the_footer_says_when_how_and_with_what(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=2, clients=3))
    told = {
        "started": "2026-03-01T10:20:30+00:00",
        "command": "quiver run 'my <b>.toml'",
        "commit": "0123456789ab-dirty",
    }
    (folder / "environment.json").write_text(json.dumps(told))
    footer = re.search(r"<footer>.*</footer>", report(folder))
    assert footer is not None
    assert footer.group() == (
        "<footer><p>Made from one run folder written by Quiver 0.1.0 (commit 0123456789ab-dirty), "
        "started 2026-03-01 10:20 UTC. Rounds are counted from 1.</p>"
        "<p><code>quiver run &#x27;my &lt;b&gt;.toml&#x27;</code></p></footer>"
    )


def test_ids_are_unique_and_every_reference_has_its_target(comparison: tuple[Path, str]) -> None:
    text = comparison[1].partition("<script>")[0]
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    used = re.findall(r"url\(#([^)]+)\)", text) + [a[1:] for a in page.addresses if a[0] == "#"]
    assert set(used) <= set(page.ids)


def test_every_picture_is_well_formed_and_has_a_title(comparison: tuple[Path, str]) -> None:
    pictures = re.findall(r"<svg.*?</svg>", comparison[1], flags=re.DOTALL)
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        title = root.find("title")
        assert title is not None
        assert title.text
        assert "style" not in {element.tag for element in root.iter()}


def test_the_same_runs_give_the_same_file(comparison: tuple[Path, str]) -> None:
    folder, text = comparison
    assert report(folder) == text


def test_the_asked_stage_comes_first(comparison: tuple[Path, str]) -> None:
    folder, local_first = comparison
    mixed_first = report(folder, stage="mixed")
    for text, first, second in (
        (local_first, "stage local", "stage mixed"),
        (mixed_first, "stage mixed", "stage local"),
    ):
        words = Page(text).text
        assert words.index(first) < words.index(second)


def notes(*folders: Path) -> str:
    return " ".join(list_notes(group_runs(find_runs(folders))))


def test_random_pull_is_said_to_be_outside_the_theorem(tmp_path: Path) -> None:
    recipe = Recipe(topology={"name": "random_pull", "neighbors": 2}, rounds=2, clients=5)
    assert notes(write_run(tmp_path / "pull", recipe)) == (
        "DFedPGP used random_pull: the paper's theorem does not cover it. "
        "μ stays 1 and the mean of u is not conserved."
    )
    assert notes(write_run(tmp_path / "push", Recipe(rounds=2, clients=5))) == ""


def test_a_crashed_run_with_half_its_files_is_reported_as_what_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=5, clients=4), finished=False)
    for name in ("partition.npz", "environment.json"):
        (folder / name).unlink()
    for name, keep in (("history.jsonl", 4), ("rounds.jsonl", 2)):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:keep]) + lines[keep][:25])
    text = Page(report(folder)).text
    assert "DFedPGP (seed 0) has not finished: 2 of 5 rounds." in text
    assert "No counts per class: DFedPGP." in text
    assert "Not recorded." in text


def test_a_run_before_its_first_round_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=5, clients=4), finished=False)
    for name in ("history.jsonl", "rounds.jsonl"):
        (folder / name).write_text("")
    text = Page(report(folder)).text
    assert "Nothing has been evaluated yet." in text
    assert "0 of 5 rounds" in text


def test_a_configuration_with_nothing_in_it_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    text = Page(report(tmp_path / "run")).text
    assert "unknown" in text
    assert "cannot be drawn" in text


def test_regression_is_reported_by_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=3, clients=4, metrics=("loss",)))
    text = Page(report(folder)).text
    assert "Last round, loss" in text
    assert "Test loss at stages" in text


def test_what_must_be_known_before_comparing_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "all" / "a", Recipe("fedavg", STAR, rounds=3, clients=6))
    write_run(tmp_path / "all" / "b", Recipe("local", ALONE, rounds=2, clients=5))
    write_run(tmp_path / "all" / "c", Recipe("local", ALONE, rounds=2, clients=5))
    text = notes(tmp_path / "all")
    assert "The data settings differ between these experiments" in text
    assert "do not have the same number of rounds" in text
    assert "b is left out: Local with seed 0 is here already" in text
    assert "One seed each" in text


def test_text_from_files_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> $x^2$ \u202e"
    folder = write_run(tmp_path / "run", Recipe(rounds=2, clients=3))
    written = json.loads((folder / "config.json").read_text())
    written["quiver"] = evil
    written["topology"] = {"name": evil, "neighbors": evil}
    written["config"]["method"] = {"name": evil, evil: evil}
    written["config"]["data"]["name"] = evil
    written["config"]["model"]["name"] = evil
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "environment.json").write_text(json.dumps({evil: evil}))
    text = report(folder)
    page = Page(text)
    script, data = scripts(text)
    assert "alert" not in script
    assert not any("<" in content for content in data)
    assert "img" not in page.tags
    assert "alert(1)" in page.text


def test_another_file_is_never_overwritten(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=2, clients=3))
    (tmp_path / "thesis.html").write_text("years of work")
    with pytest.raises(QuiverError, match="is not a report of Quiver"):
        write_report([folder], tmp_path / "thesis.html")
    assert (tmp_path / "thesis.html").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "thesis.html"]


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert tag("p", "<b>", Markup("<i>"), title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<i></p>'
    assert tag("th", class_="a b", aria_label="x", colspan=2, id=None) == (
        '<th class="a b" aria-label="x" colspan="2"></th>'
    )
    assert join_markup("a&", Markup("&amp;")) == "a&amp;&amp;"
    assert isinstance(join_markup("a"), Markup)
