# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Full disks: what is said, and what is left when there is room again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flashbsr import Attention, AttentionSpec, FlashbsrError, Ragged, TaskInfo
from flashbsr.jit import cache

KEY = cache.key_of("a test")
TEXT = "struct Roomy : flashbsr::VariantBase { float room = 1; };"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    at = tmp_path / "disk" / "cache"
    at.parent.mkdir()
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(at))
    monkeypatch.setenv("FLASHBSR_QUIET", "1")
    return at


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """A real one of 256 KiB, under the cache; the shared object of a variant takes more."""
    libc = ctypes.CDLL(None, use_errno=True)
    at = os.fsencode(folder.parent)
    if libc.mount(b"none", at, b"tmpfs", 0, b"size=256k"):
        pytest.skip(f"may not mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield folder.parent
    libc.umount2(at, 2)  # MNT_DETACH


def says_where(caught: pytest.ExceptionInfo[FlashbsrError], folder: Path) -> str:
    """The first line is about the disk; returns it."""
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"FLASHBSR_CACHE_DIR: got {folder} on a full disk (")
    assert "expected a folder on a disk with room: set it to another one" in first
    return first


def run_variant() -> None:
    attention = Attention(AttentionSpec.from_source(TEXT), TaskInfo(1, 1, 16))
    attention.plan(Ragged([0, 2], [0, 2]))
    q = np.ones((2, 1, 16), np.float32)
    assert np.all(attention.run(q, (q, q)) == 1)


def test_the_compiler_fills_it(folder: Path, disk: Path) -> None:
    with pytest.raises(FlashbsrError) as caught:
        run_variant()
    assert "No space left on device" in says_where(caught, folder)
    assert not list((folder / "tmp").iterdir()) and not cache.entries()


def test_it_is_full_before(folder: Path, disk: Path) -> None:
    cache.get_or_build(KEY, ".bin", lambda path: path.write_bytes(b"code") and None)
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(2**20))
    with pytest.raises(FlashbsrError) as caught:
        run_variant()
    says_where(caught, folder)
    cache.get_or_build(KEY, ".bin", lambda path: pytest.fail("built again"))
    (disk / "filler").unlink()
    cache.get_or_build(cache.key_of("b"), ".bin", lambda path: path.write_bytes(b"x") and None)
    assert len(cache.entries()) == 2


def test_a_build_fills_it(folder: Path) -> None:
    def build(path: Path) -> None:
        path.write_bytes(b"half of")
        Path("/dev/full").write_bytes(b"code")

    with pytest.raises(FlashbsrError) as caught:
        cache.get_or_build(KEY, ".bin", build)
    says_where(caught, folder)
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["mkdir", "write_text", "replace"])
def test_writing_an_entry_fills_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, name, full)
    with pytest.raises(FlashbsrError) as caught:
        cache.get_or_build(KEY, ".bin", lambda path: path.write_bytes(b"code") and None)
    monkeypatch.undo()
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(folder))
    assert os.strerror(number) in says_where(caught, folder)
    assert not cache.entries() and not list(folder.glob("tmp/*"))


def test_other_errors_of_a_build_are_its_own() -> None:
    def build(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "c++")

    with pytest.raises(PermissionError):
        cache.get_or_build(KEY, ".bin", build)


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded"])
def test_words_of_a_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """In English whatever the user's language, and not looked for in errors of a user's text."""
    fake = tmp_path / "g++"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("CXX", str(fake))
    fake.write_text(f'#!/bin/sh\n[ "$LC_ALL" = C ] && echo "ld: cc.o: {words}" >&2\nexit 1\n')
    fake.chmod(0o755)
    with pytest.raises(FlashbsrError) as caught:
        run_variant()
    assert f"(g++: {words})" in says_where(caught, folder)
    fake.write_text(f'#!/bin/sh\necho "Roomy:1:1: error: {words}" >&2\nexit 1\n')
    with pytest.raises(FlashbsrError, match=r"^variant: got C\+\+ that g\+\+ does not compile"):
        run_variant()
