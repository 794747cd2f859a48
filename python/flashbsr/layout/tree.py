# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Trees of draft tokens: speculative decoding verifies all branches of a request in one call.

The drafts' keys and values are appended behind the context like any new tokens, one after another.
Draft token *i* sees the context, its ancestors and itself (Miao et al., SpecInfer, ASPLOS 2024,
section 4; Cai et al., Medusa, ICML 2024, section 2.1.2)::

    keep j  iff  j < context  or  j - context in {i, parent[i], parent[parent[i]], ...}

Only the last ``q_len`` of a request's ``kv_len`` columns need bits, so the plan has no others:
``q_len^2`` bits per request, and kernels run without a mask up to the first draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_indices
from ..arrays.types import Array
from ..errors import FlashbsrError, IndexRangeError, ShapeError, UnsupportedError
from ..variant.spec import AttentionSpec

__all__ = ["DraftTrees", "check_tree_spec", "draft_trees"]


def check_tree_spec(spec: AttentionSpec) -> None:
    """Raise `UnsupportedError` where positions would be counted along the drafts.

    Kernels place query token i at ``kv_len - q_len + i``, a tree at ``kv_len - q_len + depth``.
    """
    if spec.pos_encoding_mode != "NONE":
        raise UnsupportedError(
            "pos_encoding_mode",
            repr(spec.pos_encoding_mode),
            "'NONE' with tree_parents: a draft's position is its depth. Rotate q and k with "
            "apply_rope_pos_ids and DraftTrees.positions",
        )
    if spec.window_left >= 0:
        raise UnsupportedError(
            "window_left",
            spec.window_left,
            "-1 with tree_parents: a draft's window ends at its depth. Write tree and window into "
            "one custom_mask (DraftTrees.mask)",
        )
    if spec.variant is not None and spec.variant.uses_positions:
        raise UnsupportedError(
            "variant",
            f"{spec.variant.name}, which asks for positions or the request",
            "one that does not with tree_parents, where a draft's position is its depth; or the "
            "tree as a custom_mask (DraftTrees.mask), next to which positions are counted along "
            "the drafts",
        )


@dataclass(frozen=True)
class DraftTrees:
    """The draft tokens of a batch; `draft_trees` makes it.

    Attributes
    ----------
    qo_indptr : int32 array [B + 1]
        Request *i* has the draft tokens ``qo_indptr[i]`` to ``qo_indptr[i + 1]``.
    parents : int32 array [qo_indptr[-1]]
        Each token's parent, counted from its request's first token; -1: it follows the context.
        What ``plan(tree_parents=)`` takes.
    depths : int32 array [qo_indptr[-1]]
        Number of a token's ancestors.

    Examples
    --------
    Token 0 follows the context, 1 and 2 are two guesses of what follows it, 3 follows guess 1.

    >>> import numpy as np
    >>> import flashbsr
    >>> trees = flashbsr.draft_trees([[-1, 0, 0, 1]])
    >>> trees.positions(np.array([20])).tolist()
    [16, 17, 17, 18]
    """

    qo_indptr: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]

    def positions(self, kv_lens: Array) -> npt.NDArray[np.int32]:
        """Find the tokens' positions in their sequences: for RoPE, and for embeddings.

        Parameters
        ----------
        kv_lens : int32 or int64 array [B]
            KV tokens of each request, the drafts included.

        Returns
        -------
        int32 array [qo_indptr[-1]]
            ``kv_len - q_len + depth``.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError
            Not one length per request, or one that is less than its drafts.
        """
        context = self._contexts(kv_lens)
        return np.repeat(context, np.diff(self.qo_indptr)).astype(np.int32) + self.depths

    def mask(self, kv_lens: Array) -> npt.NDArray[np.bool_]:
        """Write the trees as a custom mask, for what ``tree_parents`` cannot say: windows, say.

        Parameters
        ----------
        kv_lens : int32 or int64 array [B]
            As for `positions`.

        Returns
        -------
        bool array [sum_i q_len_i * kv_len_i]
            Row-major per request.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError
        """
        parts = [np.zeros(0, bool)]
        for b, context in enumerate(self._contexts(kv_lens).tolist()):
            parents = self.parents[self.qo_indptr[b] : self.qo_indptr[b + 1]]
            rows = np.zeros((len(parents), context + len(parents)), bool)
            rows[:, :context] = True
            for i, parent in enumerate(parents):
                if parent >= 0:
                    rows[i] = rows[parent]
                rows[i, context + i] = True
            parts.append(rows.ravel())
        return np.concatenate(parts)

    def _contexts(self, kv_lens: Array) -> npt.NDArray[np.int64]:
        """KV tokens before the drafts."""
        lens, drafts = to_indices(kv_lens, "kv_lens"), np.diff(self.qo_indptr)
        if lens.shape != drafts.shape:
            raise ShapeError("kv_lens", f"shape {lens.shape}", f"{drafts.shape}: one per request")
        short = np.flatnonzero(lens < drafts)
        if short.size:
            at = int(short[0])
            raise IndexRangeError(
                f"kv_lens[{at}]", lens[at], f"at least {drafts[at]}: the drafts' keys are in the KV"
            )
        return lens - drafts


def draft_trees(parents: Sequence[Sequence[int] | Array]) -> DraftTrees:
    """Join the draft trees of a batch for ``plan``.

    Parameters
    ----------
    parents : sequence of int sequences or arrays
        One per request: for each draft token, in the order of their rows in q and of their keys
        behind the context, the number of its parent among them, which must be smaller; -1: it
        follows the context. A request may have several such roots, or no token.

    Returns
    -------
    DraftTrees

    Raises
    ------
    DTypeError, ShapeError, IndexRangeError
        Not integers; not a vector per request; a parent that does not come first.

    Examples
    --------
    One request with a tree of four drafts behind 16 tokens, one that decodes a single token.

    >>> import numpy as np
    >>> from flashbsr import Attention, AttentionSpec, Paged, TaskInfo, draft_trees
    >>> trees = draft_trees([[-1, 0, 0, 1], [-1]])
    >>> attention = Attention(AttentionSpec(), TaskInfo(4, 2, 64))
    >>> kv_lens = np.array([20, 5])
    >>> pages = np.array([0, 2, 3]), np.array([5, 3, 0])
    >>> layout = Paged(trees.qo_indptr, *pages, kv_lens=kv_lens, page_size=16)
    >>> attention.plan(layout, tree_parents=trees.parents)
    >>> q, cache = np.ones((5, 4, 64), np.float32), np.ones((8, 2, 16, 2, 64), np.float32)
    >>> attention.run(q, cache).shape
    (5, 4, 64)
    """
    rows = [to_indices(x, f"parents[{b}]") for b, x in enumerate(_sequence(parents))]
    for b, row in enumerate(rows):
        wrong = np.flatnonzero((row < -1) | (row >= np.arange(len(row))))
        if wrong.size:
            at = int(wrong[0])
            raise IndexRangeError(
                f"parents[{b}][{at}]", row[at], f"-1, or an earlier token's number, below {at}"
            )
    qo_indptr = np.cumsum([0, *map(len, rows)])
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    first = np.repeat(qo_indptr[:-1], np.diff(qo_indptr))
    depths, above = np.zeros(len(flat), np.int32), flat
    while (alive := above >= 0).any():
        depths += alive
        above = np.where(alive, flat[first + np.maximum(above, 0)], -1)
    return DraftTrees(qo_indptr.astype(np.int32), flat.astype(np.int32), depths)


def _sequence(parents: Any) -> Sequence[Any]:
    if not isinstance(parents, (list, tuple)):
        raise FlashbsrError(
            "parents", type(parents).__name__, "a list with the parents of each request"
        )
    return parents
