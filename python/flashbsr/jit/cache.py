# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels.

An entry is a file ``<key><suffix>`` and beside it ``<key><suffix>.json`` with its digest, which is
written last: a process that dies at any point leaves an entry that is complete or is none. Any
number of processes and threads may ask at once; one builds, the others wait for it.

The folder is ``$FLASHBSR_CACHE_DIR``, else ``$XDG_CACHE_HOME/flashbsr``, else
``~/.cache/flashbsr``. ``$FLASHBSR_CACHE_MAX_MB`` (1024) bounds it: what was not used for longest
goes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FlashbsrError

__all__ = ["Entry", "clear", "entries", "folder", "get_or_build", "key_of"]

# Not evicted: another process may just have been given the path and not opened it yet.
_RECENT_S = 60.0
# Of builds that were killed. The longest compilation takes seconds.
_ABANDONED_S = 3600.0
_WANTED_FOLDER = "a folder that this user may write, to keep compiled kernels in"


@dataclass(frozen=True)
class Entry:
    """A file of the cache: `label` says what for, `used` is the time of its last use."""

    path: Path
    label: str
    size: int
    used: float


def folder() -> Path:
    """Name the folder of the cache; it need not exist.

    Raises
    ------
    FlashbsrError
        Nothing names it and the user has no home.
    """
    given, base = os.environ.get("FLASHBSR_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        at = Path(given or (f"{base}/flashbsr" if base else "~/.cache/flashbsr")).expanduser()
    except RuntimeError:  # a container's user without a name and without $HOME
        raise FlashbsrError(
            "FLASHBSR_CACHE_DIR", "nothing, and no home folder", _WANTED_FOLDER
        ) from None
    return at.absolute()  # the loader would look for a bare name elsewhere


def key_of(*parts: str | bytes) -> str:
    """SHA-256 of the parts, of which each counts with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def get_or_build(key: str, suffix: str, build: Callable[[Path], None], *, label: str = "") -> Path:
    """Path of an entry; makes it if it is not there or is not what was stored.

    Parameters
    ----------
    key : str
        Of everything that decides about the file: sources, flags, compiler, architecture.
    suffix : str
        Of the file, with its dot.
    build : callable
        Writes the file to the path that it is given. What it raises is passed on, and leaves no
        entry.
    label : str
        What ``flashbsr cache list`` says of it.

    Raises
    ------
    FlashbsrError
        The folder cannot be written.
    """
    path = folder() / f"{key}{suffix}"
    if _is_whole(path):
        return path
    limit = _limit()
    with _locked(key):
        if not _is_whole(path):
            _build(path, build, label)
            _evict(limit, keep=path)
    return path


def entries() -> list[Entry]:
    """All entries, the most recently used first."""
    found = []
    for about in folder().glob("*.json"):
        path = about.with_suffix("")
        with contextlib.suppress(OSError, ValueError, KeyError):  # evicted meanwhile, or damaged
            label = str(json.loads(about.read_text())["label"])
            found.append(Entry(path, label, path.stat().st_size, about.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> int:
    """Remove every entry; returns how many there were.

    Programs that run keep what they have loaded.

    Raises
    ------
    FlashbsrError
        The folder cannot be written.
    """
    removed = len(entries())
    # Only names that are ours: the folder may be any that the user named.
    with _writing():
        for path in [*folder().glob("[0-9a-f]" * 64 + ".*"), *folder().glob("tmp/*")]:
            path.unlink(missing_ok=True)
    return removed


def _about(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether the entry is there as it was stored; notes that it is used."""
    about = _about(path)
    try:
        stored = json.loads(about.read_text())["digest"]
        if stored != _digest(path):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    with contextlib.suppress(OSError):  # a cache that is only read has no order of use
        os.utime(about)
    return True


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Say of an error of the file system which folder it was, and how to name another."""
    try:
        yield
    except OSError as error:
        given = "" if os.environ.get("FLASHBSR_CACHE_DIR") else ", the default,"
        raise FlashbsrError(
            "FLASHBSR_CACHE_DIR", f"{folder()}{given} and {error}", _WANTED_FOLDER
        ) from None


@contextlib.contextmanager
def _locked(key: str) -> Iterator[None]:
    """Hold the lock of a key: flock of an own descriptor, so that threads exclude each other too.

    It goes with its process, however that ends. 256 lock files serve all keys, so that none has to
    be removed, which could not be done without a race.
    """
    at = folder() / "locks" / key[:2]
    with _writing():
        at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(at, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Not left to close(): a process forked meanwhile has the same open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _build(path: Path, build: Callable[[Path], None], label: str) -> None:
    temporary = path.parent / "tmp"
    with _writing():
        temporary.mkdir(mode=0o700, exist_ok=True)
    made = temporary / f"{uuid.uuid4().hex}{path.suffix}"
    about = temporary / f"{made.name}.json"
    try:
        build(made)
        with _writing():
            content: dict[str, Any] = {"digest": _digest(made), "label": label}
            about.write_text(json.dumps(content))
            made.replace(path)
            about.replace(_about(path))
    finally:
        made.unlink(missing_ok=True)
        about.unlink(missing_ok=True)


def _limit() -> int:
    text = os.environ.get("FLASHBSR_CACHE_MAX_MB", "1024")
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not megabytes >= 0:
        raise FlashbsrError("FLASHBSR_CACHE_MAX_MB", repr(text), "a number of megabytes")
    return int(megabytes * 2**20)


def _evict(limit: int, keep: Path) -> None:
    """Keep the cache below its bound, and remove what killed builds left."""
    now, total = time.time(), 0
    for entry in entries():
        total += entry.size
        if total > limit and entry.path != keep and now - entry.used > _RECENT_S:
            _about(entry.path).unlink(missing_ok=True)
            entry.path.unlink(missing_ok=True)
            total -= entry.size
    for left in (folder() / "tmp").iterdir():
        with contextlib.suppress(OSError):
            if now - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
