# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend over a cache of its own and batches made by hand, compared with float64.

They run with SGLang where it is installed, otherwise with the names that stand in for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compare import assert_attention
from flashbsr import errors
from harness import framework
from reference import DTYPES, Variant, attend, rounded

torch = framework("torch")
stand_in = importlib.import_module("stand_in_sglang")
door = importlib.import_module("flashbsr.integrations.sglang")

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 4, 2, 64, 512, 192
SRT = "sglang.srt."
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window_size": 9},
    "window of two": {"sliding_window_size": 1},
    "soft cap": {"logit_cap": 2.0},
}


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    """SGLang, or what stands in for it."""
    stand_in.install()
    yield
    stand_in.uninstall()


def part(name: str) -> Any:
    return importlib.import_module(SRT + name)


def mode(name: str) -> Any:
    return part("model_executor.forward_batch_info").ForwardMode[name]


def forget(buffer: Any) -> None:
    """NaN; in a pool the codes of float8 are bytes."""
    if buffer.dtype.itemsize == 1:
        buffer.view(torch.uint8).fill_(0x7F)
    else:
        buffer.fill_(float("nan"))


class Serving:
    """Requests, SGLang's pool and table of slots, and two layers of different kinds."""

    def __init__(
        self, page: int = 1, dtype: str = "float32", first: dict[str, Any] | None = None,
        kv: str | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        self.page, self.dtype, self.rng = page, dtype, np.random.default_rng(page)
        self.type, self.kv_type = getattr(torch, dtype), getattr(torch, kv or dtype)
        self.modules, buffers = self.make(first or {})
        for layer in self.layers:  # as a checkpoint gives them
            if scale is not None:
                layer.k_scale, layer.v_scale = torch.tensor(scale), torch.tensor(2 * scale)
                layer.k_scale_float, layer.v_scale_float = scale, 2 * scale
        for buffer in buffers:
            forget(buffer)
            buffer[0] = 0  # the slot that pads
        self.table = torch.full((9, CONTEXT), SLOTS - 1, dtype=torch.int32)
        self.table[0] = 0
        self.free = list(self.rng.permutation(np.arange(1, SLOTS // page)))
        self.kv: list[list[tuple[Any, Any]]] = []  # of each request and layer
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool, page_size=page, dtype=self.type,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            model=torch.nn.ModuleList(self.modules),
        )  # fmt: skip
        self.runner = runner
        self.backend = part("layers.attention.attention_registry").ATTENTION_BACKENDS[door.NAME](
            runner
        )

    def make(self, first: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Make the model's modules, the layers that are run among them, and the pool's buffers."""
        radix = part("layers.radix_attention").RadixAttention
        pool = part("mem_cache.memory_pool").MHATokenToKVPool
        self.options = [first, {"sliding_window_size": 20}]
        self.layers = [
            radix(HEADS, DIM, 0.1, KV_HEADS, layer_id=i, **options)
            for i, options in enumerate(self.options)
        ]
        self.pool = pool(
            SLOTS, self.page, self.kv_type, KV_HEADS, DIM, len(self.layers), "cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        return self.layers, [*self.pool.k_buffer, *self.pool.v_buffer]

    def stored(self, x: Any, scale: float | None) -> Any:
        """What the cache has of keys or values."""
        if self.kv_type == self.type:
            return x
        codes = self.tensor(x)
        if scale is not None:
            codes.div_(scale)
        return codes.to(self.kv_type).float().numpy() * (1.0 if scale is None else scale)

    def new_page(self, slots: Any) -> None:
        """A page is a request's from now on."""

    def keys(self, n: int) -> tuple[Any, Any]:
        """Keys and values of new tokens."""
        return self.rows(n, KV_HEADS), self.rows(n, KV_HEADS)

    def add(self, prefix: int | None = None, tokens: int = 0) -> None:
        """A request; its first tokens are those of another, as the radix cache finds them."""
        self.kv.append([self.keys(0)] * len(self.layers))
        if prefix is not None:
            assert tokens % self.page == 0
            row = len(self.kv)
            self.table[row, :tokens] = self.table[prefix + 1, :tokens]
            self.kv[-1] = [(k[:tokens], v[:tokens]) for k, v in self.kv[prefix]]

    def rows(self, n: int, heads: int, dim: int = DIM) -> Any:
        return rounded(self.rng.standard_normal((n, heads, dim)), self.dtype)

    def tensor(self, x: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(self.type)

    def batch(self, name: str, who: list[int], counts: list[int], **info: Any) -> Any:
        """A forward batch whose requests get so many tokens each; slots are found for them."""
        before = [len(self.kv[i][0][0]) for i in who]
        locations = []
        for i, n, begin in zip(who, counts, before, strict=True):
            for at in range(begin, begin + n):
                if at % self.page == 0:
                    base = int(self.free.pop()) * self.page
                    room = self.table[i + 1, at : at + self.page]
                    room[:] = torch.arange(base, base + len(room))
                    self.new_page(torch.arange(base, base + self.page))
                locations.append(int(self.table[i + 1, at]))
        drafts = name == "TARGET_VERIFY"
        lens = [b + (0 if drafts else n) for b, n in zip(before, counts, strict=True)]
        return SimpleNamespace(
            forward_mode=mode(name), batch_size=len(who), seq_lens=torch.tensor(lens),
            seq_lens_cpu=torch.tensor(lens), req_pool_indices=torch.tensor(who) + 1,
            extend_seq_lens_cpu=None if name == "DECODE" or drafts else counts,
            out_cache_loc=torch.tensor(locations, dtype=torch.int64),
            spec_info=SimpleNamespace(draft_token_num=counts[0], **info) if drafts else None,
        )  # fmt: skip

    def step(self, name: str, who: list[int], counts: list[int], masks: Any = None,
             **info: Any) -> None:  # fmt: skip
        """Serve a step through both layers and compare."""
        fb = self.batch(name, who, counts, **info)
        self.backend.init_forward_metadata(fb)
        self.run(fb, who, counts, masks)

    def run(self, fb: Any, who: list[int], counts: list[int], masks: Any = None) -> None:
        total, padding = sum(counts), len(fb.out_cache_loc) - sum(counts)
        for layer, options in zip(self.layers, self.options, strict=True):
            q, k, v = (
                np.concatenate([x, np.ones((padding, *x.shape[1:]))])
                for x in (self.rows(total, HEADS), *self.keys(total))
            )
            forward = (
                self.backend.forward_decode
                if fb.forward_mode.is_decode()
                else self.backend.forward_extend
            )
            out = forward(self.tensor(q).flatten(1), self.tensor(k), self.tensor(v), layer, fb)
            assert out.shape == (len(q), HEADS * v.shape[2])
            begin = 0
            for i, n in zip(who, counts, strict=True):
                at = slice(begin, begin + n)
                held = self.kv[i][layer.layer_id]
                scales = layer.k_scale_float, layer.v_scale_float
                new = (self.stored(x[at], s) for x, s in zip((k, v), scales, strict=True))
                mine = tuple(np.concatenate(pair) for pair in zip(held, new, strict=True))
                self.kv[i][layer.layer_id] = mine
                self.check(out[at], q[at], *mine, options, None if masks is None else masks[i])
                begin += n

    def check(self, out: Any, q: Any, k: Any, v: Any, options: dict[str, Any], mask: Any) -> None:
        window = options.get("sliding_window_size", -1)
        variant = Variant(
            causal=mask is None, window_left=window, sm_scale=0.1,
            logits_soft_cap=options.get("logit_cap"),
        )  # fmt: skip
        states = [
            attend(q, k, v, variant, mask=mask, work=work, out_dtype=work)
            for work in (None, self.dtype)
        ]
        shape = *q.shape[:2], v.shape[2]
        got = out.float().numpy().reshape(shape).astype(DTYPES[self.dtype])
        assert_attention(got, None, *states, self.dtype, f"{options}")


@pytest.fixture(autouse=True)
def registered(sglang: None) -> None:
    door.register()


def mixed_steps(serving: Serving) -> None:
    """Prompts in chunks, decodes, both in one step, a prefix that is shared; NaN elsewhere."""
    serving.add()
    serving.add()
    serving.step("EXTEND", [0, 1], [40, 3])
    serving.step("EXTEND", [0], [25])
    serving.step("DECODE", [0, 1], [1, 1])
    serving.add(prefix=0, tokens=48)
    serving.step("MIXED", [2, 1], [7, 1])


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_a_server(name: str, dtype: str, page: int) -> None:
    serving = Serving(page, dtype, LAYERS[name])
    mixed_steps(serving)
    for _ in range(3):
        serving.step("DECODE", [1, 2, 0], [1, 1, 1])


def test_drafts_in_a_chain_are_causal() -> None:
    """Verification of a draft of one branch; the mask that SGLang has of it is not needed."""
    serving = Serving()
    serving.add()
    serving.add()
    serving.step("EXTEND", [0, 1], [30, 5])
    serving.step("TARGET_VERIFY", [1, 0], [4, 4], custom_mask=None, topk=1)


@pytest.mark.parametrize("page", [1, 16])
def test_drafts_in_a_tree_follow_the_mask(page: int) -> None:
    """Siblings do not see each other; what is behind the mask's last row is not read."""
    serving = Serving(page)
    serving.options[1] = {}
    serving.layers[1].sliding_window_size = -1
    backend = part("layers.attention.attention_registry").ATTENTION_BACKENDS[door.NAME]
    serving.backend = backend(serving.runner)
    serving.add()
    serving.add()
    serving.step("EXTEND", [0, 1], [30, 5])
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    masks = {i: np.concatenate([np.ones((4, n), bool), tree], axis=1) for i, n in ((0, 30), (1, 5))}
    flat = np.concatenate([masks[1].ravel(), masks[0].ravel(), np.zeros(50, bool)])
    serving.step("TARGET_VERIFY", [1, 0], [4, 4], masks, custom_mask=torch.from_numpy(flat), topk=2)


class Hybrid(Serving):
    """The second layer, which has a window, keeps its tokens in a pool of its own."""

    WINDOW_SLOTS = 320

    def make(self, first: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        super().make(first)
        pools = part("mem_cache.swa_memory_pool").SWAKVPool
        self.pool = pools(
            SLOTS, self.WINDOW_SLOTS, self.page, self.kv_type, KV_HEADS, DIM,
            swa_attention_layer_ids=[1], full_attention_layer_ids=[0], device="cpu",
        )  # fmt: skip
        self.map = torch.zeros(SLOTS + self.page + 1, dtype=torch.int64)
        self.pool.register_mapping(self.map)
        pages = np.arange(1, self.WINDOW_SLOTS // self.page)
        self.free_of_windows = list(self.rng.permutation(pages))
        parts = self.pool.full_kv_pool, self.pool.swa_kv_pool
        return self.layers, [x for p in parts for x in (*p.k_buffer, *p.v_buffer)]

    def new_page(self, slots: Any) -> None:
        begin = int(self.free_of_windows.pop()) * self.page
        self.map[slots] = torch.arange(begin, begin + self.page)

    def pass_windows(self, who: int) -> None:
        """Free the pages that the next token's window has passed."""
        length, window = len(self.kv[who][1][0]), self.options[1]["sliding_window_size"]
        passed = max(length - window, 0) // self.page * self.page
        slots = self.table[who + 1, :passed].long()
        for buffer in (*self.pool.swa_kv_pool.k_buffer, *self.pool.swa_kv_pool.v_buffer):
            mine = buffer[self.map[slots]]
            forget(mine)
            buffer[self.map[slots]] = mine
        self.map[slots] = 0


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kv", [None, "float8_e4m3fn"])
def test_sliding_layers_have_a_pool_of_their_own(kv: str | None, page: int) -> None:
    """Slots are found by SGLang's map; what windows have passed is gone."""
    serving = Hybrid(page, "bfloat16", kv=kv)
    mixed_steps(serving)
    for _ in range(4):
        for who in (1, 2):  # the first has what it shares with the last
            serving.pass_windows(who)
        serving.step("DECODE", [1, 2, 0], [1, 1, 1])


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_of_eight_bits(dtype: str, kv: str, scale: float | None, page: int) -> None:
    """Written by SGLang, divided by the scales that a checkpoint has, and read with these."""
    serving = Serving(page, dtype, kv=kv, scale=scale)
    mixed_steps(serving)
    serving.step("DECODE", [1, 2, 0], [1, 1, 1])


@pytest.mark.parametrize("kind", [Serving, Hybrid])
def test_captured_steps_follow_later_plans(kind: type[Serving]) -> None:
    """The hooks of CUDA graphs: requests that pad a batch change nothing for the others."""
    serving = kind()
    for _ in range(2):
        serving.add()
    serving.step("EXTEND", [0, 1], [30, 5])
    backend = serving.backend
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    captured = None
    for turn in range(3):
        fb = serving.batch("DECODE", [0, 1], [1, 1])
        fb.batch_size = 4
        fb.seq_lens = fb.seq_lens_cpu = torch.cat([fb.seq_lens, torch.full((2,), fill)])
        fb.req_pool_indices = torch.cat([fb.req_pool_indices, torch.zeros(2, dtype=torch.int64)])
        fb.out_cache_loc = torch.cat([fb.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
        backend.init_forward_metadata_out_graph(fb, in_capture=turn == 0)
        engines = []
        for windowed, steps in backend.steps.items():
            step = backend.forward_metadata[windowed]
            assert step.captured
            engines += [step.attention(kind) for kind in steps.kinds]
        assert captured is None or all(a is b for a, b in zip(engines, captured, strict=True))
        captured = engines
        serving.run(fb, [0, 1], [1, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"is_cross_attention": True}, "is_cross_attention"),
        ({"use_irope": True}, "use_irope"),
        ({"v_head_dim": 32}, "v_head_dim"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"logit_cap": 2.0, "logit_capping_method": "other"}, "logit_capping_method"),
    ],
)
def test_layers_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=said):
        Serving(first=options)


def test_steps_and_options_are_refused_by_name() -> None:
    """A draft model's steps, another cache, and arguments of other kinds of attention."""
    serving = Serving()
    serving.add()
    with pytest.raises(errors.UnsupportedError, match="forward_mode"):
        serving.step("DRAFT_EXTEND_V2", [0], [3])
    fb = serving.batch("EXTEND", [0], [3])
    serving.backend.init_forward_metadata(fb)
    q, k = torch.zeros(3, HEADS * DIM), torch.zeros(3, KV_HEADS, DIM)
    with pytest.raises(errors.UnsupportedError, match="q_rope"):
        serving.backend.forward_extend(q, k, k, serving.layers[0], fb, q_rope=q)
    other = SimpleNamespace(**{**vars(serving.runner), "dtype": torch.bfloat16})
    with pytest.raises(errors.UnsupportedError, match="kv_cache_dtype"):
        type(serving.backend)(other)
    other = SimpleNamespace(**{**vars(serving.runner), "token_to_kv_pool": object()})
    with pytest.raises(errors.UnsupportedError, match="token_to_kv_pool: got object"):
        type(serving.backend)(other)


def test_sinks_join_the_softmax() -> None:
    serving = Serving()
    serving.add()
    fb = serving.batch("EXTEND", [0], [6])
    serving.backend.init_forward_metadata(fb)
    q, k, v = (serving.rows(6, n) for n in (HEADS, KV_HEADS, KV_HEADS))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    out = serving.backend.forward_extend(
        *(serving.tensor(x) for x in (q, k, v)), serving.layers[0], fb, sinks=sinks
    )
    want = attend(q, k, v, Variant(causal=True, sm_scale=0.1), sinks=sinks.float().numpy())
    np.testing.assert_allclose(out.numpy().reshape(want.out.shape), want.out, rtol=0, atol=1e-5)


def test_the_name_is_registered_once() -> None:
    door.register()
    choices = part("arg_groups.choices").ATTENTION_BACKEND_CHOICES
    assert choices.count(door.NAME) == 1
