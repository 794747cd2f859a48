# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Around attention: cache writes, RoPE, states, bits. Needs no plan."""
