# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashbsr` is the `flashbsr` command."""

from __future__ import annotations

import sys

from flashbsr.cli import main

if __name__ == "__main__":
    sys.exit(main())
