# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What is computed: `AttentionSpec`, variants in C++ or Python, RoPE. Knows no plan."""
