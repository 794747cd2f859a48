# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site, built once. Needs the extra ``docs``."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_pages import Page, build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder where it will be."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    """Build it."""
    return build(site)
