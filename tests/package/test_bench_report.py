# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a benchmark run: every workload of the record, and nothing from elsewhere."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from flashbsr import cli
from flashbsr.bench.page import write_report

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


class Rows(HTMLParser):
    """First cells of tables' rows, and marks of what was missed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.first: list[str] = []
        self.missed = 0
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._cell = tag == "tr" or (self._cell and tag == "td")
        self.missed += ("class", "missed") in attrs

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.first.append(data)
        self._cell = False


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_all_of_a_record(path: Path, tmp_path: Path) -> None:
    record = json.loads(path.read_text())
    names = [row["name"] for row in record["results"]]
    missed = [goal for row in record["results"] for goal in row["goals"] if not goal["met"]]
    for goals in (False, True):
        page = tmp_path / "report.html"
        write_report(record, page, goals=goals)
        text = page.read_text()
        assert not re.search(r"https?://|src=|@import|url\(|>nan|inf<", text)
        found = Rows(text)
        assert sorted(found.first) == sorted(names)
        assert found.missed == (len(missed) if goals else 0)
        assert ("missed by" in text) == (goals and bool(missed))


def test_names_are_text_and_gaps_are_gaps(tmp_path: Path) -> None:
    record: Any = copy.deepcopy(json.loads(RECORDS[0].read_text()))
    record["results"] = record["results"][:2]
    record["results"][0] |= {
        "name": "<b>",
        "times": {},
        "metrics": {},
        "goals": [],
        "note": "a & b",
    }
    page = tmp_path / "report.html"
    write_report(record, page, goals=True)
    assert "&lt;b&gt;</td><td>-</td>" in page.read_text()
    assert "a &amp; b" in page.read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    line = ["bench", "--only", "plan-16", "--quick", "--no-peer", "--report"]
    assert cli.main([*line, str(page)]) == 0
    assert f"report: {page}" in capsys.readouterr().out
    assert Rows(page.read_text()).first == ["plan-16"]
    assert cli.main([*line, str(tmp_path / "missing" / "report.html")]) == 2
    assert "--report" in capsys.readouterr().err
