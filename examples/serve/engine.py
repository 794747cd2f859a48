# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The serving engine: continuous batching, chunked prefill, prefix sharing, preemption.

One call of `Engine.step` takes at most `budget` tokens through the model: one for every request
that decodes, and chunks of the prompts of the others, oldest first. A request whose next page
cannot be had takes the pages of the youngest one, which starts over later ("preemption by
recomputation"; the prefix that is still cached is not computed again).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .model import Batch, Model
from .pages import PagePool, page_digests
from .sampling import sample
from .tokenizer import END

# Pages left free for each running request when another is admitted. One page led to a preemption
# per request under load, four to one in ten, with half the time to first token.
_MARGIN = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for."""

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    arrival: float = 0.0  # seconds after the start
    ignore_end: bool = False  # write max_new_tokens whatever the model says
    sample_of: int | None = None  # number of the request of this prompt that computes it


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: its tokens, its pages, and what is needed to measure and check it."""

    request: Request
    order: int
    arrived: float  # on the engine's clock, as the times below
    tokens: list[int]
    rng: np.random.Generator
    computed: int = 0  # tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # "length" | "end"
    preemptions: int = 0
    shared_tokens: int = 0  # of the prompt, found in pages of other requests
    logits: list[NDArray[np.float32]] = field(default_factory=list)  # one row per generated token
    states: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # position -> hidden

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did."""

    prefill_tokens: int
    decode_tokens: int
    emitted: list[tuple[Sequence, int]]
    finished: list[Sequence]


class Engine:
    """Serves requests with one model.

    Parameters
    ----------
    model : Model
    pool : PagePool
        Of the model's number of pages and page size.
    budget : int
        Tokens per step.
    record : bool
        Keep logits and hidden states for `check.py`.
    share : bool
        Let requests with equal beginnings have the same pages.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        budget: int = 128,
        record: bool = True,
        share: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if budget < 1:
            raise ValueError(f"budget: got {budget}; expected at least 1 token per step")
        self.model, self.pool, self.budget = model, pool, budget
        self.record, self.share, self.clock = record, share, clock
        self.waiting: list[Sequence] = []  # by order of arrival, as `running`
        self.running: list[Sequence] = []
        self.steps = self.peak_pages = self.preemptions = 0
        self.shared_pages = 0  # found when a request was first admitted
        self.lost_tokens = self.restored_tokens = 0  # by preemption; found again after it
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """True while a request is not finished."""
        return bool(self.waiting or self.running)

    def submit(self, request: Request, arrived: float | None = None) -> Sequence:
        """Queues a request.

        Raises
        ------
        ValueError
            It could never be served: empty, too long for the model, or larger than the whole cache.
        """
        longest = len(request.prompt) + request.max_new_tokens
        room = min(self.model.config.context, self.pool.num_pages * self.pool.page_size)
        if not request.prompt or request.max_new_tokens < 1 or longest > room:
            raise ValueError(
                f"request {request.number}: got {len(request.prompt)} prompt tokens and "
                f"max_new_tokens={request.max_new_tokens}; expected both >= 1, sum <= {room}"
            )
        sequence = Sequence(
            request=request,
            order=self._submitted,
            arrived=self.clock() if arrived is None else arrived,
            tokens=list(request.prompt),
            rng=np.random.default_rng([request.seed, request.number]),
        )
        self._submitted += 1
        self.waiting.append(sequence)
        return sequence

    def step(self) -> Step:
        """Schedules, computes and samples once."""
        scheduled = self._schedule()
        if not scheduled:
            return Step(0, 0, [], [])
        hidden = self.model.forward(self._batch(scheduled))
        self.steps += 1
        self.peak_pages = max(self.peak_pages, self.pool.num_pages - self.pool.available)
        decoding = sum(len(s.tokens) > len(s.request.prompt) and n == 1 for s, n in scheduled)
        emitted = self._sample(scheduled, hidden)
        finished = [s for s, _ in emitted if s.finish_reason is not None]
        for sequence in finished:
            self.running.remove(sequence)
            self.pool.release(sequence.pages)
            sequence.pages = []
        prefilled = sum(n for _, n in scheduled) - decoding
        return Step(prefilled, decoding, emitted, finished)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """Sequences of this step with their token counts; each holds the pages it needs."""
        left, preempted = self.budget, self.preemptions
        scheduled: dict[Sequence, int] = {}
        # Decodes first (one token each), then prompts in progress; each group oldest first.
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.computed > 1):
            count = min(len(sequence.tokens) - sequence.computed, left)
            if count and sequence in self.running and self._grow(sequence, count, scheduled):
                scheduled[sequence] = count
            left = self.budget - sum(scheduled.values())
        if self.preemptions == preempted:
            while left and self.waiting and self._admit(self.waiting[0]):
                sequence = self.waiting.pop(0)
                bisect.insort(self.running, sequence, key=lambda s: s.order)
                count = min(len(sequence.tokens) - sequence.computed, left)
                scheduled[sequence] = count
                left -= count
                self._grow(sequence, count, scheduled)
        return sorted(scheduled.items(), key=lambda item: item[0].order)

    def _admit(self, sequence: Sequence) -> bool:
        """Shares the cached prefix and makes sure that the rest of the tokens will find room."""
        if self.share and self._prompt_is_computed_by_another(sequence):
            return False
        size = self.pool.page_size
        # The last token is always computed: its logits are needed.
        full = (len(sequence.tokens) - 1) // size
        sequence.digests = page_digests(sequence.tokens, size, full, sequence.digests)
        pages = self.pool.share(sequence.digests) if self.share else []
        reserved = sum(self.pool.pages_for(len(s.tokens)) - len(s.pages) for s in self.running)
        missing = self.pool.pages_for(len(sequence.tokens)) - len(pages)
        if missing > self.pool.available - reserved - _MARGIN * len(self.running):
            self.pool.release(pages)
            return False
        sequence.pages, sequence.computed = pages, len(pages) * size
        if sequence.preemptions:
            self.restored_tokens += sequence.computed
        else:
            sequence.shared_tokens = sequence.computed
            self.shared_pages += len(pages)
        return True

    def _prompt_is_computed_by_another(self, sequence: Sequence) -> bool:
        """Whether the first sample of the prompt is on it: its pages are worth the wait."""
        first = sequence.request.sample_of
        return any(
            s.request.number == first and s.computed < len(s.request.prompt) for s in self.running
        )

    def _grow(self, sequence: Sequence, count: int, scheduled: dict[Sequence, int]) -> bool:
        """Pages for `count` more tokens, from younger requests if need be; False: itself went."""
        missing = self.pool.pages_for(sequence.computed + count) - len(sequence.pages)
        while missing > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            scheduled.pop(victim, None)
            if victim is sequence:
                return False
        sequence.pages += [self.pool.allocate() for _ in range(missing)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self.lost_tokens += sequence.computed
        sequence.pages, sequence.computed = [], 0
        sequence.preemptions += 1
        self.preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def _batch(self, scheduled: list[tuple[Sequence, int]]) -> Batch:
        def indptr(counts: list[int]) -> NDArray[np.int32]:
            return np.cumsum([0, *counts], dtype=np.int32)

        tokens = [t for s, n in scheduled for t in s.tokens[s.computed : s.computed + n]]
        return Batch(
            tokens=np.array(tokens, np.int32),
            qo_indptr=indptr([n for _, n in scheduled]),
            kv_indptr=indptr([len(s.pages) for s, _ in scheduled]),
            kv_indices=np.array([p for s, _ in scheduled for p in s.pages], np.int32),
            kv_lens=np.array([s.computed + n for s, n in scheduled], np.int32),
        )

    def _sample(
        self, scheduled: list[tuple[Sequence, int]], hidden: NDArray[np.float32]
    ) -> list[tuple[Sequence, int]]:
        """Publishes full pages, and draws a token for each sequence that is fully computed."""
        ends = np.cumsum([n for _, n in scheduled])
        ready = [i for i, (s, n) in enumerate(scheduled) if s.computed + n == len(s.tokens)]
        logits = self.model.logits(hidden[ends[ready] - 1])
        rows = dict(zip(ready, logits, strict=True))
        emitted = []
        for i, (sequence, count) in enumerate(scheduled):
            if self.record:
                chunk = hidden[ends[i] - count : ends[i]]
                sequence.states.update(enumerate(chunk, sequence.computed))
            sequence.computed += count
            self._publish(sequence, count)
            if i not in rows:
                continue
            request = sequence.request
            token = sample(rows[i], request.temperature, request.top_p, sequence.rng)
            sequence.tokens.append(token)
            sequence.token_times.append(self.clock())
            if self.record:
                sequence.logits.append(rows[i])
            if token == END and not request.ignore_end:
                sequence.finish_reason = "end"
            elif len(sequence.generated) == request.max_new_tokens:
                sequence.finish_reason = "length"
            emitted.append((sequence, token))
        return emitted

    def _publish(self, sequence: Sequence, count: int) -> None:
        """Makes the pages findable that the last `count` tokens filled."""
        if not self.share:
            return
        size = self.pool.page_size
        first, full = (sequence.computed - count) // size, sequence.computed // size
        if first < full:
            sequence.digests = page_digests(sequence.tokens, size, full, sequence.digests)
            for i in range(first, full):
                self.pool.publish(sequence.pages[i], sequence.digests[i])
