# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Sentence embeddings of all-MiniLM-L6-v2 over a ragged batch (see README.md)."""
