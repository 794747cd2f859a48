# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Python functions of scores and indices become a variant: traced once, written as C++.

`functions` are those to compute with, `value` what a function sees, `capture` replaces the arrays
that it has by itself, `emit` writes the C++, and `build` puts them together.
"""
