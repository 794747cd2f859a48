# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Caches that others own or may write: what lies there would be loaded into the process."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flashbsr import FlashbsrError
from flashbsr.jit import cache, trust

KEY = cache.key_of("a test")
OTHER, NOBODY = 4711, 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who gives files away")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with one entry, where another user may look for it."""
    before = os.umask(0o022)  # of whoever runs the tests; so is TMPDIR, which may be private
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    above.chmod(0o755)
    at = above / "cache"
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(at))
    assert get() == b"code"
    yield at
    os.umask(before)
    shutil.rmtree(above)


def get(key: str = KEY, content: bytes = b"code") -> bytes:
    return cache.content_or_build(key, ".bin", lambda path: void(path.write_bytes(content)))


def void(_: object) -> None:
    """A build returns nothing."""


def never(path: Path) -> None:
    raise AssertionError(f"built again: {path}")


def refused(path: Path, why: str) -> None:
    """Neither the entry nor a new one is made or read, and the first line says why."""
    for build in (never, lambda path: void(path.write_bytes(b"other"))):
        with pytest.raises(FlashbsrError) as caught:
            cache.get_or_build(KEY, ".bin", build)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"FLASHBSR_CACHE_DIR: got {path}, which {why}; expected")
        assert "another folder" in line and f"chown -R {os.geteuid()}" in line


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o707, 0o2775])
def test_a_folder_that_others_may_write(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    refused(folder, f"others may write (mode {mode:o})")
    folder.chmod(0o755)
    assert get(content=b"not built") == b"code"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555, 0o1777, 0o2755])
def test_folders_that_others_cannot_change_files_in(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    cache.get_or_build(KEY, ".bin", never)
    folder.chmod(0o755)


@pytest.mark.parametrize("name", ["locks", "tmp"])
def test_a_folder_in_it_that_others_may_write(folder: Path, name: str) -> None:
    (folder / name).chmod(0o777)
    with pytest.raises(FlashbsrError, match=f"got {folder}/{name}, which others may write"):
        get(cache.key_of("another"))
    cache.get_or_build(KEY, ".bin", never)  # what is there does not pass through it


@pytest.mark.parametrize("suffix", [".bin", ".bin.json"])
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_an_entry_that_others_may_write(folder: Path, suffix: str, mode: int) -> None:
    at = folder / f"{KEY}{suffix}"
    at.chmod(mode)
    refused(at, f"others may write (mode {mode:o})")


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("elsewhere"), Path.mkdir])
@pytest.mark.parametrize("suffix", [".bin", ".bin.json"])
@pytest.mark.timeout(30)
def test_an_entry_that_is_no_file(folder: Path, suffix: str, make: Callable[[Path], None]) -> None:
    """A pipe is not waited for, a link is not followed."""
    at = folder / f"{KEY}{suffix}"
    at.rename(folder / "elsewhere")
    make(at)
    refused(at, "is no regular file")


@as_root
@pytest.mark.parametrize("what", ["", f"{KEY}.bin", f"{KEY}.bin.json"])
def test_what_another_user_owns(folder: Path, what: str) -> None:
    """Root reads everything, and is refused it all the same."""
    os.chown(folder / what, OTHER, 0)
    refused(folder / what, f"belongs to user {OTHER}")
    os.chown(folder / what, 0, OTHER)  # a group that may not write
    cache.get_or_build(KEY, ".bin", never)


@as_root
@pytest.mark.parametrize("name", ["locks", "tmp"])
def test_a_folder_in_it_that_another_user_owns(folder: Path, name: str) -> None:
    """In a folder like /tmp anybody can be the first to make them."""
    folder.chmod(0o1777)
    os.chown(folder / name, OTHER, OTHER)
    with pytest.raises(FlashbsrError, match=f"got {folder}/{name}, which belongs to user {OTHER}"):
        get(cache.key_of("another"))


@as_root
def test_a_link_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to a good cache until it is changed. One's own may lead where it likes."""
    link = folder.with_name("link")
    link.symlink_to(folder)
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(link))
    cache.get_or_build(KEY, ".bin", never)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    refused(link, f"belongs to user {OTHER}")


def as_user(user: int, action: Callable[[], bytes]) -> str:
    """What the action returns or raises in a process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            result = action().decode()
        except BaseException as error:  # it goes to the parent
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


# JAX, which another test may have imported, warns of its threads; the children only read and write.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@as_root
def test_who_else_may_read_a_cache(folder: Path) -> None:
    """Root's serves everybody, one's own only oneself."""
    folder.chmod(0o755)
    assert as_user(NOBODY, lambda: get(content=b"mine")) == "code"
    another = as_user(NOBODY, lambda: get(cache.key_of("another")))
    assert another.startswith(f"FlashbsrError: FLASHBSR_CACHE_DIR: got {folder} and [Errno 13]")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER, OTHER)
    assert as_user(OTHER, lambda: get(content=b"built")) == "code"
    assert f"{folder}, which belongs to user {OTHER}" in as_user(NOBODY, get)
    refused(folder, f"belongs to user {OTHER}")


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_what_is_made_only_its_user_may_write(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        shutil.rmtree(folder)
        get()
    finally:
        os.umask(before)
    for path in (folder, folder / "locks", folder / "tmp"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 3 and not any(path.stat().st_mode & 0o022 for path in files)
    cache.get_or_build(KEY, ".bin", never)


def attempt(path: Path) -> bytes:
    try:
        return trust.read_file(path)
    except FlashbsrError:
        return b"refused"
    except FileNotFoundError:
        return b"gone"


@as_root
def test_a_file_exchanged_between_look_and_read(folder: Path) -> None:
    """An attacker with the folder above puts good and bad in its place, by turns."""
    bad = folder.with_name("bad")
    shutil.copytree(folder, bad)
    (bad / f"{KEY}.bin").write_bytes(b"evil")
    for path in (bad, *bad.rglob("*")):
        os.chown(path, OTHER, OTHER)
    stop, aside = threading.Event(), folder.with_name("aside")

    def exchange() -> None:
        while not stop.is_set():
            folder.rename(aside)
            bad.rename(folder)
            folder.rename(bad)
            aside.rename(folder)

    thread = threading.Thread(target=exchange)
    thread.start()
    seen, deadline = set(), time.monotonic() + 20
    try:
        for i in itertools.count():
            seen.add(attempt(folder / f"{KEY}.bin"))
            if (i > 5000 and len(seen) > 2) or time.monotonic() > deadline:
                break
    finally:
        stop.set()
        thread.join()
    assert b"evil" not in seen
    assert {b"code", b"refused"} <= seen  # else the attack did not take place
