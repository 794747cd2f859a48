# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A small language model served the way an inference engine serves a large one (see README.md)."""
