# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Whose files the cache takes: this user's and root's, where nobody else may write them.

What lies in the cache is loaded into the process, so who can write there can run code as this user.
Root's files are as good as the system's libraries; anybody else's are refused, by root too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import FlashbsrError

__all__ = ["check_folder", "read_file"]


def check_folder(path: Path) -> None:
    """Refuse a folder that others own or may write; it need not exist.

    A folder with the sticky bit, such as ``/tmp``, may be open to all: what one user puts there no
    other can replace.

    Raises
    ------
    FlashbsrError
        It is refused; the message says why.
    OSError
        It cannot be looked at.
    """
    try:
        os.close(_open_folder(path))
    except FileNotFoundError:
        return


def read_file(path: Path) -> bytes:
    """Read a file of the cache, once it and its folder are seen to be nobody else's.

    Both stay open between the look and the read, so that nothing can be put in their place.

    Raises
    ------
    FlashbsrError
        The file or the folder is refused.
    OSError
        It is not there, or cannot be read.
    """
    folder = _open_folder(path.parent)
    try:
        # Before it is opened: another user's may be unreadable, or a pipe without a writer.
        _check_file(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            _check_file(path, os.fstat(descriptor))
            return file.read()
    finally:
        os.close(folder)


def _open_folder(path: Path) -> int:
    _check_owner(path, path.lstat())  # a link's owner decides where it leads
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        _check_owner(path, status)
        if not status.st_mode & stat.S_ISVTX:
            _check_mode(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_file(path: Path, status: os.stat_result) -> None:
    _check_owner(path, status)
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, "is no regular file")
    _check_mode(path, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise _refusal(path, f"belongs to user {status.st_uid}")


def _check_mode(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, f"others may write (mode {stat.S_IMODE(status.st_mode):o})")


def _refusal(path: Path, why: str) -> FlashbsrError:
    user = os.geteuid()
    users = f"user {user} or root" if user else "root"
    return FlashbsrError(
        "FLASHBSR_CACHE_DIR",
        f"{path}, which {why}",
        f"files that only {users} may write, since they are loaded into this process: "
        "set it to another folder (one that does not exist is made for this user alone), or if you "
        f"trust what is there, chown -R {user} and chmod -R go-w",
    )
