# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation site, read without a browser."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

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


def build(site: Path) -> dict[Path, Page]:
    """Build the site; a warning fails."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, check=False
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
