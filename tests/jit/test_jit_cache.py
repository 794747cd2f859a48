# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels: races, killed builds, damage, its bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flashbsr import FlashbsrError
from flashbsr.cli import main
from flashbsr.jit import cache

KEY = cache.key_of("a test")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    at = tmp_path / "cache"
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(at))
    monkeypatch.delenv("FLASHBSR_CACHE_MAX_MB", raising=False)
    return at


def writes(content: bytes, log: list | None = None):
    def build(path: Path) -> None:
        if log is not None:
            log.append(path)
        path.write_bytes(content)

    return build


def age(key: str, seconds: float) -> None:
    about = cache.folder() / f"{key}.bin.json"
    os.utime(about, (time.time() - seconds,) * 2)


def test_built_once_and_found_again():
    log = []
    first = cache.get_or_build(KEY, ".bin", writes(b"code", log), label="one")
    second = cache.get_or_build(KEY, ".bin", writes(b"other", log))
    assert first == second and first.read_bytes() == b"code" and len(log) == 1
    (entry,) = cache.entries()
    assert (entry.path, entry.label, entry.size) == (first, "one", 4)


def test_keys_count_the_lengths_of_their_parts():
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc") != cache.key_of("abc")
    assert cache.key_of("ab", "c") == cache.key_of(b"ab", "c")


def test_folder_by_environment(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv("FLASHBSR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "flashbsr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "flashbsr"


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_bytes(b"cod"),
        lambda p: p.write_bytes(b"c0de"),
        lambda p: p.unlink(),
        lambda p: p.with_name(p.name + ".json").unlink(),
        lambda p: p.with_name(p.name + ".json").write_text("{"),
        lambda p: p.with_name(p.name + ".json").write_text("[1]"),
        lambda p: p.with_name(p.name + ".json").write_text('{"label": "no digest"}'),
    ],
    ids=["cut", "changed", "gone", "no digest file", "half a digest file", "a list", "no digest"],
)
def test_damage_is_found_and_repaired(damage):
    path = cache.get_or_build(KEY, ".bin", writes(b"code"))
    damage(path)
    log = []
    assert cache.get_or_build(KEY, ".bin", writes(b"code", log)).read_bytes() == b"code"
    assert len(log) == 1
    cache.get_or_build(KEY, ".bin", writes(b"code", log))
    assert len(log) == 1


def test_a_failed_build_leaves_nothing(folder):
    def fails(path: Path) -> None:
        path.write_bytes(b"half of")
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        cache.get_or_build(KEY, ".bin", fails)
    assert not cache.entries() and not list((folder / "tmp").iterdir())
    assert cache.get_or_build(KEY, ".bin", writes(b"code")).read_bytes() == b"code"


def test_threads_build_once():
    log, found = [], []

    def slow(path: Path) -> None:
        log.append(path)
        time.sleep(0.2)
        path.write_bytes(b"code")

    threads = [
        threading.Thread(target=lambda: found.append(cache.get_or_build(KEY, ".bin", slow)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log) == 1 and len(found) == 8 and found[0].read_bytes() == b"code"


PROGRAM = """
import os, pathlib, sys, time
from flashbsr.jit import cache
log, pause = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def build(path):
    with log.open("a") as f:
        f.write(f"{os.getpid()}\\n")
    path.write_bytes(b"co")
    time.sleep(pause)
    path.write_bytes(b"code")
print(cache.get_or_build(cache.key_of("a test"), ".bin", build).read_bytes().decode())
"""


def start(log: Path, pause: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(log), str(pause)], stdout=subprocess.PIPE, text=True
    )


def test_sixteen_processes_build_once(tmp_path):
    log = tmp_path / "log"
    racing = [start(log, 0.3) for _ in range(16)]
    answers = [process.communicate(timeout=120)[0].strip() for process in racing]
    assert answers == ["code"] * 16
    assert len(log.read_text().split()) == 1


def test_a_killed_build_is_taken_over(tmp_path, folder):
    log = tmp_path / "log"
    victim = start(log, 60)
    while not log.exists():
        time.sleep(0.01)
    waiting = start(log, 0)
    time.sleep(0.3)
    assert waiting.poll() is None  # behind the lock of the one that compiles
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert waiting.communicate(timeout=60)[0].strip() == "code"
    assert len(log.read_text().split()) == 2
    # What the victim left is no entry, and went with the next build.
    assert len(cache.entries()) == 1 and not list((folder / "tmp").iterdir())


def test_what_killed_builds_left_goes_and_what_is_being_built_stays(tmp_path, folder):
    log = tmp_path / "log"
    building = start(log, 60)
    try:
        while not log.exists():
            time.sleep(0.01)
        (mine,) = (folder / "tmp").iterdir()
        left = [mine.with_name(cache.key_of(str(i))) for i in range(8)]
        left.append(mine.with_name(mine.name[:2] + left[0].name[2:]))  # behind the same lock
        for at in left:
            at.mkdir()
            (at / "half of.so").write_bytes(b"co")
        cache.get_or_build(cache.key_of("another"), ".bin", writes(b"x"))
        assert set((folder / "tmp").iterdir()) == {mine, left[-1]}
        assert cache.clear() == 1
        assert list(mine.iterdir()) and building.poll() is None
    finally:
        building.kill()
        building.communicate()
    cache.get_or_build(cache.key_of("another"), ".bin", writes(b"x"))
    assert not list((folder / "tmp").iterdir())


def test_least_recently_used_goes_first(monkeypatch):
    monkeypatch.setenv("FLASHBSR_CACHE_MAX_MB", "0.003")  # three kilobytes and a little
    keys = [cache.key_of(str(i)) for i in range(4)]
    for i, key in enumerate(keys[:3]):
        cache.get_or_build(key, ".bin", writes(bytes(1000)))
        age(key, 1000 - i)
    cache.get_or_build(keys[0], ".bin", writes(b"not called"))  # used again
    cache.get_or_build(keys[3], ".bin", writes(bytes(1000)))
    left = {entry.path.stem for entry in cache.entries()}
    assert left == {keys[0], keys[2], keys[3]}
    assert not (cache.folder() / f"{keys[1]}.bin.json").exists()


def test_what_was_just_used_stays(monkeypatch):
    monkeypatch.setenv("FLASHBSR_CACHE_MAX_MB", "0")
    first = cache.get_or_build(KEY, ".bin", writes(b"code"))
    second = cache.get_or_build(cache.key_of("another"), ".bin", writes(b"code"))
    assert first.exists() and second.exists()


@pytest.mark.parametrize("text", ["-1", "much", "nan", ""])
def test_bad_bound(monkeypatch, text):
    monkeypatch.setenv("FLASHBSR_CACHE_MAX_MB", text)
    with pytest.raises(FlashbsrError, match="FLASHBSR_CACHE_MAX_MB"):
        cache.get_or_build(KEY, ".bin", writes(b"code"))


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(FlashbsrError, match="FLASHBSR_CACHE_DIR.*that this user may write"):
        cache.get_or_build(KEY, ".bin", writes(b"code"))
    assert cache.entries() == [] and cache.clear() == 0


def test_a_default_folder_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.delenv("FLASHBSR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(FlashbsrError, match="FLASHBSR_CACHE_DIR: got /dev/null/flashbsr, the def"):
        cache.get_or_build(KEY, ".bin", writes(b"code"))


def test_a_disk_that_is_full_while_building(folder, monkeypatch):
    """What the file system says comes with the name of the folder; no half of an entry is left."""

    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FlashbsrError, match="FLASHBSR_CACHE_DIR.*No space left on device"):
        cache.get_or_build(KEY, ".bin", writes(b"code"))
    monkeypatch.undo()
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(folder))
    assert not cache.entries() and not list((folder / "tmp").iterdir())


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("FLASHBSR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(FlashbsrError, match="FLASHBSR_CACHE_DIR: got nothing, and no home"):
        cache.get_or_build(KEY, ".bin", writes(b"code"))


@pytest.mark.parametrize("given", ["cache", ".", "~/cache"])
def test_relative_folders_become_absolute(given, monkeypatch, tmp_path):
    """A library's name without a folder is looked for elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", given)
    assert cache.folder() == (tmp_path if given == "." else tmp_path / "cache")


def test_clear_removes_entries_and_nothing_else(folder):
    path = cache.get_or_build(KEY, ".bin", writes(b"code"))
    cache.get_or_build(cache.key_of("another"), ".so", writes(b"code"))
    mine = folder / "notes.json"
    mine.write_text("{}")
    assert cache.clear() == 2
    assert not path.exists() and not cache.entries() and mine.exists()
    assert cache.clear() == 0


def test_command(folder, capsys):
    assert main(["cache", "list"]) == 0
    assert "0 kernels, 0.0 MiB" in capsys.readouterr().out
    cache.get_or_build(KEY, ".bin", writes(bytes(2048)), label="alibi avx2, g++")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: 1 kernel," in out and KEY[:12] in out and "2 KiB" in out
    assert "alibi avx2, g++" in out
    assert main(["cache", "clear"]) == 0
    assert "removed 1 kernel" in capsys.readouterr().out and not cache.entries()
