# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Python functions of scores and indices become a variant: traced once, written as C++.

`functions` are those to compute with, `value` what a function sees and `operations` what it does
with that; `capture` replaces the arrays that a function has by itself, `emit` writes the C++, and
`build` puts them together. `evaluate` computes the same on NumPy arrays.
"""
