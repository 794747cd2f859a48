# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled at run time: source text, compilers, and the cache of what they made.

Nothing here is imported before an `Attention` needs code that the build does not have.
"""
