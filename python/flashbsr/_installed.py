# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Files that come with the package: headers, and the CMake package that finds them."""

from __future__ import annotations

import flashbsr._core as _core

__all__ = ["get_cmake_dir", "get_include"]


def _installed(*parts: str) -> str:
    from pathlib import Path  # 3 ms that `import flashbsr` does not need

    # Beside the compiled module, which is there in an editable install too.
    path = Path(_core.__file__).parent.joinpath(*parts)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: this installation of flashbsr has no such files")
    return str(path)


def get_include() -> str:
    """Directory to put on the include path: ``#include <flashbsr/...>``.

    Returns
    -------
    str

    Raises
    ------
    FileNotFoundError
        The package was installed without headers.

    Examples
    --------
    >>> import pathlib
    >>> pathlib.Path(get_include(), "flashbsr", "config.h").is_file()
    True
    """
    return _installed("include")


def get_cmake_dir() -> str:
    """Directory of the CMake package: ``find_package(flashbsr)`` with ``flashbsr_DIR`` set to it.

    Returns
    -------
    str

    Raises
    ------
    FileNotFoundError
        The package was installed without it.

    Examples
    --------
    >>> import pathlib
    >>> pathlib.Path(get_cmake_dir(), "flashbsrConfig.cmake").is_file()
    True
    """
    return _installed("lib", "cmake", "flashbsr")
