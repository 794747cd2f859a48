# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The machine and the versions that a record was taken with."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "source_hash"]


def source_hash() -> str:
    """First 12 hex digits of SHA-256 over the engine's installed headers, names and contents.

    A record whose hash differs from the installed package's was taken on other kernels.
    """
    import flashbsr

    root = Path(flashbsr.get_include())
    digest = hashlib.sha256()
    for path in sorted(root.rglob("flashbsr/**/*.h")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_model() -> dict[str, Any]:
    """Name, family, model and L3 of the first CPU as Linux reports them; else what Python knows."""
    found: dict[str, Any] = {"name": platform.processor() or platform.machine()}
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        found["name"] = fields.get("model name", found["name"])
        for key, label in (("cpu family", "family"), ("model", "model"), ("cache size", "cache")):
            if key in fields:
                found[label] = fields[key]
    l3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if l3.exists():
        found["l3"] = l3.read_text().strip()
    return found


def describe_machine(threads: int) -> dict[str, Any]:
    """Collect the machine and the versions that a result depends on."""
    import flashbsr
    from flashbsr.info import engine_info

    engine = engine_info()
    versions = {"python": platform.python_version(), "flashbsr": flashbsr.__version__}
    for package in ("numpy", "ml_dtypes", "torch"):
        if importlib.util.find_spec(package) is not None:
            versions[package] = metadata.version(package)
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": threads,
        "isa": engine["isa"],
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "source_hash": source_hash(),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        machine["memory_gib"] = round(size / 2**30, 1)
    return machine
