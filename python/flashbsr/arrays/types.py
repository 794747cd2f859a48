# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Names for what a type checker cannot know: arrays and data types of any framework."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""A NumPy, PyTorch, JAX or CuPy array."""

DType: TypeAlias = Any
"""A name such as ``"bfloat16"``, or a data type of any of these frameworks."""

Scale: TypeAlias = Any
"""A number, or a float32 array with one per head."""
