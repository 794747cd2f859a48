# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every error that the package raises on purpose.

The message always reads ``<argument>: got <actual>; expected <expected>``, whether the check ran in
Python or in C++. All classes are `ValueError`; `DTypeError` is a `TypeError` as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

__all__ = [
    "CapacityError",
    "CudaError",
    "DTypeError",
    "DeviceError",
    "FlashbsrError",
    "IndexRangeError",
    "PlanError",
    "ShapeError",
    "UnsupportedError",
    "renamed",
]


class FlashbsrError(ValueError):
    """A call that cannot be carried out as asked. Nothing was written.

    Parameters
    ----------
    argument : str
        Name of the argument, as the caller spells it.
    actual : object
        What it was. Printed with `str`.
    expected : str
        What is allowed, and the way out where there is one.
    code : str, optional
        Short machine-readable kind. Default: the class's own (``"value"`` here).

    Attributes
    ----------
    argument, actual, expected, code
        The parameters above.

    Examples
    --------
    >>> raise FlashbsrError("kv_layout", "'NDH'", "'NHD' or 'HND'")
    Traceback (most recent call last):
        ...
    flashbsr.errors.FlashbsrError: kv_layout: got 'NDH'; expected 'NHD' or 'HND'
    """

    default_code: ClassVar[str] = "value"

    def __init__(
        self, argument: str, actual: object, expected: str, code: str | None = None
    ) -> None:
        # What BaseException has, so that the error survives pickling. Not by super().__init__,
        # which torch.compile does not read.
        self.args = (argument, actual, expected, code)
        self.argument = argument
        self.actual = actual
        self.expected = expected
        self.code = code or self.default_code

    def respell(self, names: Mapping[str, str]) -> FlashbsrError:
        """Copy the error with the caller's name of the argument.

        Parameters
        ----------
        names : mapping of str to str
            The core's names to the caller's. ``"kv_indices[7]"`` is looked up without its index.

        Returns
        -------
        FlashbsrError
            Of the same class.
        """
        name, bracket, index = self.argument.partition("[")
        return type(self)(names.get(name, name) + bracket + index, *self.args[1:])

    def __str__(self) -> str:
        return f"{self.argument}: got {self.actual}; expected {self.expected}"


class ShapeError(FlashbsrError):
    """Wrong rank, extent or stride of an array. ``code == "shape"``."""

    default_code = "shape"


class DTypeError(FlashbsrError, TypeError):
    """Wrong element type, or not an array at all. ``code == "dtype"``."""

    default_code = "dtype"


class DeviceError(FlashbsrError):
    """An array that lives where the backend cannot reach it. ``code == "device"``."""

    default_code = "device"


class IndexRangeError(FlashbsrError):
    """Index data out of range: indptr, page ids, last_page_len, positions. ``code == "index"``."""

    default_code = "index"


class CapacityError(FlashbsrError):
    """More than the capacity that `TaskInfo` or a buffer fixed. ``code == "capacity"``."""

    default_code = "capacity"


class PlanError(FlashbsrError):
    """``run`` before ``plan``, or a ``run`` that does not match the plan. ``code == "plan"``."""

    default_code = "plan"


class UnsupportedError(FlashbsrError):
    """An option that exists but not here; `expected` names the way out. ``code == "unsupported"``.

    No option is ever accepted and ignored.
    """

    default_code = "unsupported"


class CudaError(FlashbsrError):
    """The CUDA driver refused a call, or is missing. ``code == "cuda"``.

    `argument` names the call and, for a launch, the kernel with its shape; `actual` is what the
    driver said.
    """

    default_code = "cuda"


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Give arguments in messages the caller's names."""
    try:
        yield
    except FlashbsrError as error:
        raise error.respell(names) from None
