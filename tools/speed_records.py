# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Records of engines' speed on a GPU: tests/records/<engine>-<device>.json, kept and judged."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_hash import ROOT
from gpu_steps import slug

RECORDS = ROOT / "tests" / "records"

Lines = Callable[[dict[str, Any]], tuple[bool, list[str]]]
"""Of outcomes by name: whether they are good, and what to say of them."""


def keep(engine: str, outcomes: dict[str, Any], source_hash: str) -> None:
    """Write the record of this machine's GPU."""
    import torch

    device = torch.cuda.get_device_name(0)
    content = {
        "device": device,
        "torch": torch.__version__,
        "version": version(engine),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "source_hash": source_hash,
        "outcomes": outcomes,
    }
    path = RECORDS / f"{engine}-{slug(device)}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"record: {path}")


def check(
    engine: str, names: Sequence[str], source_hash: str, lines: Lines, folder: Path = RECORDS
) -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    paths = sorted(folder.glob(f"{engine}-*.json"))
    status = 0 if paths else 1
    for path in paths:
        content = json.loads(path.read_text())
        stale = content["source_hash"] != source_hash
        complete = set(content["outcomes"]) == set(names)
        print(
            f"{content['device']}, {engine} {content['version']}, {content['date'][:10]}"
            + ", STALE" * stale
            + ", INCOMPLETE" * (not complete)
        )
        try:
            good, said = lines(content["outcomes"])
        except KeyError as missing:
            if not stale:
                raise
            good, said = False, [f"no {missing}: an older version of the program measured it"]
        print("\n".join(f"  {text}" for text in said))
        status |= stale or not complete or not good
    return int(status)
