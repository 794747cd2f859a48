# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of multi-head latent attention, as a cache server would run it."""
