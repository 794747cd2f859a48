# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a warning, its links lead somewhere, and a newcomer's
questions are answered within two clicks. Needs the extra ``docs``."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_pages import QUESTIONS, Page, targets


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 25
    wrong = []
    for path, page in pages.items():
        if path.name in ("genindex.html", "search.html", "py-modindex.html"):
            continue
        for target, anchor in targets(path, page):
            if target.suffix != ".html":
                if not target.exists():
                    wrong.append((path.name, str(target)))
            elif target not in pages or (anchor and anchor not in pages[target].anchors):
                wrong.append((path.name, f"{target.name}#{anchor}"))
    assert not wrong


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_it(pages: dict[Path, Page], question: str) -> None:
    """On the front page, or at most two clicks from it."""
    front = next(path for path in pages if path.name == "index.html")
    reached = {front}
    for _ in range(2):
        reached |= {
            target for path in reached for target, _ in targets(path, pages[path])
            if target in pages
        }  # fmt: skip
    answers = [path.name for path in reached if pages[path].says(*QUESTIONS[question])]
    assert answers
