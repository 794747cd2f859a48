# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels.

An entry is a file ``<key><suffix>`` and beside it ``<key><suffix>.json`` with its digest, which is
written last: a process that dies at any point leaves an entry that is complete or is none. Any
number of processes and threads may ask at once; one builds, the others wait for it. It does so
under a lock, in a folder ``tmp/<key>``: one whose lock nobody holds was left by a process that was
killed. What others own or may write is refused (`trust`).

The folder is ``$FLASHBSR_CACHE_DIR``, else ``$XDG_CACHE_HOME/flashbsr``, else
``~/.cache/flashbsr``. ``$FLASHBSR_CACHE_MAX_MB`` (1024) bounds it: what was not used for longest
goes first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import FlashbsrError
from .notice import waiting
from .process import unshared
from .trust import check_folder, read_file

__all__ = ["Entry", "clear", "content_or_build", "entries", "folder", "get_or_build", "key_of"]

# Not evicted: another process may just have been given the path and not opened it yet.
_RECENT_S = 60.0
_KEY = "[0-9a-f]" * 64  # as a pattern of names
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WANTED_FOLDER = "a folder that this user may write, to keep compiled kernels in"
_WANTED_ROOM = (
    "a folder on a disk with room: set it to another one, or make room (flashbsr cache clear "
    "removes the kernels that were compiled)"
)


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
        The folder cannot be written or its disk is full; others own it or what is in it, or may
        write there.
    """
    path = folder() / f"{key}{suffix}"
    _content(path, build, label)
    return path


def content_or_build(
    key: str, suffix: str, build: Callable[[Path], None], *, label: str = ""
) -> bytes:
    """As `get_or_build`, but what was read where it was checked, which nobody can exchange."""
    return _content(folder() / f"{key}{suffix}", build, label)


def _content(path: Path, build: Callable[[Path], None], label: str) -> bytes:
    found = _stored(path)
    if found is not None:
        return found
    limit = _limit()
    with _locked(path.stem, label):
        found = _stored(path)
        if found is None:
            found = _build(path, build, label)
            _evict(limit, keep=path)
    _sweep()
    return found


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
        for path in folder().glob(f"{_KEY}.*"):
            path.unlink(missing_ok=True)
        _sweep()
    return removed


def _about(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _stored(path: Path) -> bytes | None:
    """Content of the entry, if it is there as it was stored; notes that it is used."""
    about = _about(path)
    try:
        described, content = read_file(about), read_file(path)
    except OSError:
        return None
    try:
        if json.loads(described)["digest"] != _digest(content):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    with contextlib.suppress(OSError):  # a cache that is only read has no order of use
        os.utime(about)
    return content


@contextlib.contextmanager
def _writing(*, only_full: bool = False) -> Iterator[None]:
    """Say of an error of the file system which folder it was, and how to name another."""
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        if only_full and not full:
            raise
        given = "" if os.environ.get("FLASHBSR_CACHE_DIR") else ", the default,"
        raise FlashbsrError(
            "FLASHBSR_CACHE_DIR",
            f"{folder()}{given} on a full disk ({error.strerror})"
            if full
            else f"{folder()}{given} and {error}",
            _WANTED_ROOM if full else _WANTED_FOLDER,
        ) from None


def _make_folder(name: str) -> Path:
    """Make the cache's folder and one in it, for this user alone."""
    at = folder() / name
    with _writing():
        for path in (folder(), at):
            path.mkdir(mode=0o700, parents=path != at, exist_ok=True)
            check_folder(path)
    return at


@contextlib.contextmanager
def _locked(key: str, label: str = "", *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a key: flock of an own descriptor, so that threads exclude each other too.

    It goes with its process, however that ends. 256 lock files serve all keys, so that none has to
    be removed, which could not be done without a race. Who holds one writes in it who that is.

    Raises
    ------
    BlockingIOError
        Another has it, and this one does not `wait`.
    """
    at = _make_folder("locks") / key[:2]

    def opens() -> tuple[int]:
        return (os.open(at, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600),)

    with contextlib.ExitStack() as stack:
        with _writing():
            (descriptor,) = stack.enter_context(unshared(opens))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            with waiting(lambda: _holder(descriptor)):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            with contextlib.suppress(OSError):  # a full disk: who waits hears of no number
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps([os.getpid(), os.uname()[1], label]).encode(), 0)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            # Not left to close(): a process that C code forked has the same open file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _holder(descriptor: int) -> str:
    """Who holds the lock; nothing of a thread of this process, or where that is not known."""
    try:
        process, host, label = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return ""
    here = os.uname()[1]
    if (process, host) == (os.getpid(), here):
        return ""
    elsewhere = "" if host == here else f" of {host}"
    return f"process {process}{elsewhere}, which compiles {label}"


def _build(path: Path, build: Callable[[Path], None], label: str) -> bytes:
    work = _make_folder("tmp") / path.stem
    with _writing():
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed: this one has the lock
        work.mkdir(mode=0o700)
    made = work / path.name
    try:
        with _writing(only_full=True):
            build(made)
        with _writing():
            content = made.read_bytes()
            about = _about(made)
            about.write_text(json.dumps({"digest": _digest(content), "label": label}))
            for file in (made, about):
                file.chmod(file.stat().st_mode & ~0o022)  # a umask may let the group write
            made.replace(path)
            about.replace(_about(path))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return content


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
    """Keep the cache below its bound."""
    now, total = time.time(), 0
    for entry in entries():
        total += entry.size
        if total > limit and entry.path != keep and now - entry.used > _RECENT_S:
            _about(entry.path).unlink(missing_ok=True)
            entry.path.unlink(missing_ok=True)
            total -= entry.size


def _sweep() -> None:
    """Remove what builds left that were killed; those that go on hold their locks."""
    for left in folder().glob(f"tmp/{_KEY}"):
        with contextlib.suppress(BlockingIOError), _locked(left.name, wait=False):
            shutil.rmtree(left, ignore_errors=True)
