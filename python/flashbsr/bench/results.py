# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What a workload gives: times per side, metrics, and whether the goals are met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .timing import Samples
from .workloads import Workload

__all__ = ["Result"]


@dataclass(slots=True)
class Result:
    """One measured workload.

    Attributes
    ----------
    workload : Workload
    times : dict[str, Samples]
        By side: "flashbsr", "torch", "equal" (the equal-length twin of a skewed batch).
    metrics : dict[str, float]
        Derived from medians; the names that goals use.
    note : str
        How the peer was called, or why a workload was skipped.
    """

    workload: Workload
    times: dict[str, Samples] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def skipped(self) -> bool:
        """Whether nothing was timed; `note` says why."""
        return not self.times

    def goals_met(self) -> bool | None:
        """Judge the goals whose metric was measured; None without any."""
        judged = [
            goal.met(self.metrics[goal.metric])
            for goal in self.workload.goals
            if goal.metric in self.metrics
        ]
        return all(judged) if judged else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: shape, times in seconds, metrics, goals."""
        w = self.workload
        return {
            "name": w.name,
            "kind": w.kind,
            "shape": {
                "dtype": w.dtype,
                "kv_dtype": w.kv_dtype or w.dtype,
                "batch": len(w.kv_lens),
                "q_lens": list(w.q_lens),
                "kv_lens": list(w.kv_lens),
                "num_qo_heads": w.num_qo_heads,
                "num_kv_heads": w.num_kv_heads,
                "head_dim": w.head_dim,
                "page_size": w.page_size,
                "block": w.block and list(w.block),
                "kv_layout": w.kv_layout,
                "causal": w.causal,
                "window_left": w.window_left,
                "variant": w.variant,
                "fp8_accumulation": w.fp8_accumulation,
                "arrays": w.arrays,
            },
            "times": {side: samples.as_dict() for side, samples in self.times.items()},
            "metrics": dict(self.metrics),
            "goals": [
                {
                    "metric": goal.metric,
                    "at_least" if goal.at_least else "at_most": goal.bound,
                    "met": goal.met(self.metrics[goal.metric]),
                }
                for goal in w.goals
                if goal.metric in self.metrics
            ],
            "note": self.note,
        }
