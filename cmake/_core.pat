# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# What nanobind's stub generator leaves out of _core.pyi: names with two underscores.
_core.__suffix__:
    __version__: str
