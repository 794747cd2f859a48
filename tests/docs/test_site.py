# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a warning, its links lead somewhere, and a newcomer's
questions are answered within two clicks. Needs the extra ``docs``."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")

ROOT = Path(__file__).resolve().parents[2]

# What a newcomer asks, and words of the answer, which stand together on one page.
QUESTIONS = {
    "what does it do": ("attention engine for LLM inference", "block-sparse"),
    "does it run on my GPU": ("compute capability 7.5",),
    "install without a toolkit": ("FLASHBSR_CUDA_TOOLKIT",),
    "use it from vLLM": ("--attention-backend CUSTOM",),
    "is MLA there": ("latent=True", "compute capability 9.0"),
    "what is natural LSE": ("natural", "LSE", "base 2"),
    "how do I write ALiBi": ("ALIBI", "slopes"),
    "why is it fast": ("wgmma",),
    "build for one GPU": ("FLASHBSR_CUDA_ARCHS", "native"),
    "what does this error mean": ("CapacityError", "PlanError"),
}


class Page(HTMLParser):
    """Links, anchors and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.links.append(unquote(str(found["href"])))
        self.anchors |= {str(found[name]) for name in ("id", "name") if found.get(name)}

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def says(self, *words: str) -> bool:
        text = " ".join(" ".join(self.words).split())
        return all(word in text for word in words)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*build, str(ROOT / "docs"), str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}


def targets(path: Path, page: Page) -> list[tuple[Path, str]]:
    """Pages and anchors of the site that a page leads to."""
    found = []
    for link in page.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        found.append(((path.parent / name).resolve() if name else path, anchor))
    return found


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
