# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The matrix: the list of cases that every device runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import BF16, DECODE, F16, F32, FP8, MIXED, PREFILL, Case
from flashbsr import YarnScaling
from reference import Variant

DTYPE_SETS = [
    F32,
    F16,
    BF16,
    *(
        (q, kv, q)
        for q in ("float32", "float16", "bfloat16")
        for kv in ("float8_e4m3fn", "float8_e5m2")
    ),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16"),
    ("float16", "float8_e4m3fn", "bfloat16"),
    *((*FP8[:2], o) for o in ("bfloat16", "float16", "float32")),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"variant": Variant(causal=True)},
    "scale": {"variant": Variant(sm_scale=0.05)},
    "scale_zero": {"variant": Variant(sm_scale=0.0)},
    "scale_steep": {"variant": Variant(sm_scale=-25.0)},
    "scale_negative": {"variant": Variant(causal=True, sm_scale=-0.2)},
    "window": {"variant": Variant(window_left=9)},
    "window0": {"variant": Variant(causal=True, window_left=0)},
    "causal_window": {"variant": Variant(causal=True, window_left=40)},
    "softcap": {"variant": Variant(causal=True, logits_soft_cap=1.5)},
    "alibi": {"variant": Variant(causal=True, pos_encoding_mode="ALIBI")},
    "alibi_given": {"variant": Variant(pos_encoding_mode="ALIBI"), "slopes": True},
    "softcap_alibi": {
        "variant": Variant(causal=True, logits_soft_cap=1.5, pos_encoding_mode="ALIBI")
    },
    "mask": {"mask": "bool"},
    "mask_not_causal": {"mask": "bool", "variant": Variant(causal=True)},
    "mask_window": {"mask": "packed", "variant": Variant(causal=True, window_left=12)},
    "mask_packed": {"mask": "packed"},
    "mask_softcap": {"mask": "packed", "variant": Variant(logits_soft_cap=2.0)},
    "mask_sinks": {"mask": "bool", "sinks": True},
    "sinks": {"variant": Variant(causal=True), "sinks": True},
    "sinks_window": {"variant": Variant(causal=True, window_left=20), "sinks": True},
    "sinks_extreme": {"variant": Variant(causal=True), "sinks": "extreme"},
    "rope": {"variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA")},
    "rope_scaled": {
        "variant": Variant(pos_encoding_mode="ROPE_LLAMA", rope_scale=4.0, rope_theta=5e5)
    },
    "rope_llama31": {
        "variant": Variant(
            causal=True,
            pos_encoding_mode="ROPE_LLAMA",
            rope_scale=8.0,
            rope_theta=5e5,
            rope_llama31=(1.0, 4.0, 64.0),
        )
    },
    "rope_yarn": {
        "variant": Variant(
            causal=True,
            pos_encoding_mode="ROPE_LLAMA",
            rope_scale=8.0,
            rope_yarn=YarnScaling(64, beta_fast=8.0),
        )
    },
    "rope_frequencies": {
        "variant": Variant(
            pos_encoding_mode="ROPE_LLAMA",
            rope_frequencies=(0.9, 0.0, -0.3, 3.0, *(0.7**i for i in range(12))),
        )
    },
    "rope_partial": {
        "variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA", rotary_dim=32)
    },
    "rope_interleave": {
        "variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_interleave=True)
    },
    "rope_window_sinks": {
        "variant": Variant(causal=True, pos_encoding_mode="ROPE_LLAMA", window_left=25),
        "sinks": True,
    },
    "sigmoid": {"variant": Variant(activation="sigmoid", sigmoid_bias=-2.0)},
    "sigmoid_causal": {
        "variant": Variant(activation="sigmoid", causal=True, window_left=30, sm_scale=0.3)
    },
    "sigmoid_mask_softcap": {
        "variant": Variant(activation="sigmoid", logits_soft_cap=2.0),
        "mask": "bool",
    },
    "scales": {"variant": Variant(causal=True), "scales": "number"},
    "scales_head": {"variant": Variant(logits_soft_cap=3.0), "scales": "head"},
    "scales_sinks_alibi": {
        "variant": Variant(causal=True, pos_encoding_mode="ALIBI"),
        "scales": "head",
        "sinks": True,
    },
}


def dims_cases() -> Iterator[Case]:
    """Every head dim, and unequal ones, over the types."""
    sets = [F32, BF16, F16, ("bfloat16", "float8_e4m3fn", "bfloat16")]
    dims = [(d, d) for d in range(8, 257, 8)]
    dims += [(192, 128), (24, 80), (8, 256), (256, 8), (128, 64), (96, 120)]
    dims += [(320, 320), (512, 512), (512, 128), (64, 512)]
    for i, (qk, vo) in enumerate(dims):
        for dtypes in (sets[i % 4], sets[(i + 1) % 4]):
            yield Case(
                f"dim{qk}x{vo}-{dtypes[0]}-{dtypes[1]}",
                (19, 1),
                (33, 70),
                heads=(3, 1),
                dims=(qk, vo),
                dtypes=dtypes,
                variant=Variant(causal=True),
            )
    wide = DECODE.but("dim512", dims=(512, 512))
    yield wide.but("rope", variant=Variant(causal=True, pos_encoding_mode="ROPE_LLAMA"))
    for dtypes in sets:
        yield wide.but(f"{dtypes[0]}-{dtypes[1]}", dtypes=dtypes)
        yield wide.but(f"{dtypes[0]}-{dtypes[1]}-split", dtypes=dtypes, task={"num_workers": 7})


def dtype_cases() -> Iterator[Case]:
    """Every combination of types on every kind of KV."""
    for dtypes in DTYPE_SETS:
        name = "-".join(dtypes)
        scales = "number" if "float8" in dtypes[1] else None
        yield MIXED.but(name, dtypes=dtypes, scales=scales)
        yield DECODE.but(name, dtypes=dtypes, scales=scales, kv_layout="HND", stacked=False)
        yield PREFILL.but(name, dtypes=dtypes, scales="head", layout="paged", page_size=3)


RATIOS = [(1, 1), (5, 5), (3, 1), (8, 2), (14, 2), (8, 1), (32, 1), (6, 2), (64, 64)]


def head_cases() -> Iterator[Case]:
    """GQA ratios 1, 3, 4, 7, 8, 32, for few and for many rows."""
    for i, heads in enumerate(RATIOS):
        for base in (MIXED, DECODE, PREFILL):
            dtypes = (F32, BF16, F16)[i % 3]
            yield base.but(f"heads{heads[0]}x{heads[1]}", heads=heads, dims=(32, 32), dtypes=dtypes)


def layout_cases() -> Iterator[Case]:
    """Page sizes, layouts, cache kinds, front-ends."""
    for page_size in (1, 3, 16, 64):
        for kv_layout in ("NHD", "HND"):
            for stacked in (True, False):
                for layout in ("paged", "paged_lens", "table", "bounds"):
                    name = f"{layout}{page_size}-{kv_layout}-{'stacked' if stacked else 'tuple'}"
                    base = MIXED if page_size != 16 else DECODE
                    yield base.but(
                        name,
                        layout=layout,
                        page_size=page_size,
                        kv_layout=kv_layout,
                        stacked=stacked,
                        dims=(40, 40),
                        dtypes=F32 if stacked else BF16,
                    )
    yield MIXED.but("split_dims", layout="paged", stacked=False, dims=(48, 24))
    for dtypes in (F32, BF16):
        yield MIXED.but(f"ragged-HND-{dtypes[0]}", kv_layout="HND", dtypes=dtypes)


def variant_cases() -> Iterator[Case]:
    """Every variant, ragged and paged, in one piece and split over workers."""
    for name, changes in VARIANTS.items():
        yield MIXED.but(name, **changes)
        yield PREFILL.but(
            f"{name}-bf16", **{"dtypes": BF16, "layout": "paged", "heads": (6, 2), **changes}
        )
        yield DECODE.but(
            f"{name}-split", **{"dtypes": F16, "task": {"num_workers": 7}, "seed": 3, **changes}
        )
        yield MIXED.but(
            f"{name}-fixed_split",
            **{"layout": "table", "page_size": 5, "task": {"fixed_split_size": 16}, **changes},
        )


def bounds_cases() -> Iterator[Case]:
    """Every variant but masks, planned for more keys than there are: whole, split, and to sizes."""
    for i, (name, changes) in enumerate(VARIANTS.items()):
        if "mask" in changes:
            continue
        where = {"layout": "bounds", "page_size": (16, 1, 64, 5)[i % 4], "seed": i}
        where["kv_layout"] = ("NHD", "HND")[i % 2]
        yield MIXED.but(f"bounds-{name}", **where, **changes)
        yield PREFILL.but(
            f"bounds-{name}", **{**where, "dtypes": (BF16, F16)[i % 2], "heads": (6, 2)}, **changes
        )
        yield DECODE.but(f"bounds-{name}-split", **{**where, "task": {"num_workers": 7}}, **changes)
        if changes.get("variant", Variant()).window_left < 0:
            yield MIXED.but(
                f"bounds-{name}-fixed_split", **where, task={"fixed_split_size": 16}, **changes
            )
    few = Case("bounds-few", (3, 1, 4), (2000, 900, 4000), heads=(8, 1), layout="bounds", seed=1)
    for dim in (64, 128, 256):
        for dtypes in (F16, BF16, ("bfloat16", "float8_e4m3fn", "bfloat16")):
            for causal in (False, True):
                yield few.but(
                    f"dim{dim}-{dtypes[1]}-causal{causal}", dims=(dim, dim), dtypes=dtypes,
                    variant=Variant(causal=causal),
                )  # fmt: skip
    chunk = few.but("chunk", q_lens=(200, 64, 1), kv_lens=(3000, 100, 2500), dims=(128, 128))
    for dtypes in (F32, F16, BF16):
        yield chunk.but(dtypes[0], dtypes=dtypes, variant=Variant(causal=True))
    mixed = (1,) * 20 + (300, 200)
    yield few.but(
        "mixed", q_lens=mixed, kv_lens=tuple(range(100, 2300, 100)), heads=(8, 2), dims=(128, 128),
        dtypes=BF16, variant=Variant(causal=True),
    )  # fmt: skip


def length_cases() -> Iterator[Case]:
    """Empty batches, empty requests, queries longer than KV, one long among short."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "nothing": ((), ()),
        "no_rows": ((0, 0), (5, 0)),
        "no_kv": ((3, 1), (0, 0)),
        "one": ((1,), (1,)),
        "q_longer": ((9, 40), (4, 3)),
        "odd": ((7, 13, 1), (31, 257, 1023)),
        "one_long": ((1, 1, 1, 1), (5, 3000, 1, 64)),
        "many": (
            tuple(i % 3 for i in range(300)),
            tuple((7 * i) % 50 for i in range(300)),
        ),
        "tile_edges": ((15, 16, 17, 64, 65), (64, 63, 65, 128, 127)),
    }
    for name, (q_lens, kv_lens) in shapes.items():
        for causal in (False, True):
            for layout in ("ragged", "paged"):
                yield Case(
                    f"lens-{name}-{layout}{'-causal' * causal}",
                    q_lens,
                    kv_lens,
                    dims=(32, 32),
                    layout=layout,
                    variant=Variant(causal=causal),
                    dtypes=F32 if layout == "ragged" else BF16,
                )


def position_cases() -> Iterator[Case]:
    """More queries than keys: positions, and with them angles and distances, below zero."""
    for mode in ("ROPE_LLAMA", "ALIBI"):
        for causal in (False, True):
            variant = Variant(causal=causal, pos_encoding_mode=mode)
            for dtypes in (F32, BF16):
                yield Case(
                    f"positions-{mode}-{dtypes[0]}{'-causal' * causal}",
                    (9, 200, 3, 1),
                    (4, 3, 0, 70),
                    dtypes=dtypes,
                    variant=variant,
                )
    far = Case("positions-far", (2,), (40_000,), heads=(1, 1), layout="paged", page_size=64)
    for name in ("rope", "rope_llama31", "rope_yarn", "rope_partial", "alibi_given"):
        yield far.but(name, **VARIANTS[name])


def rotary_cases() -> Iterator[Case]:
    """Every number of rotated dims and both kinds of pairs, over head dims, types and layouts."""
    types = [F16, BF16, ("bfloat16", "float8_e4m3fn", "bfloat16"), F32]
    layouts: list[dict[str, Any]] = [
        {},
        {"layout": "paged", "kv_layout": "HND"},
        {"layout": "table", "page_size": 5},
    ]
    pairs = [
        (dim, rotary_dim, interleave)
        for dim in (64, 128, 256)
        for rotary_dim in (32, 64, 96, 128, 192, 256)
        for interleave in (False, True)
        if rotary_dim <= dim
    ]
    pairs += [(64, 2, True), (128, 24, True), (128, 110, True), (256, 254, True)]
    yarn = YarnScaling(100, beta_fast=4.0, attention_factor=0.8, truncate=False)
    for i, (dim, rotary_dim, interleave) in enumerate(pairs):
        for j in (i, i + 1):
            fields = {"rotary_dim": rotary_dim, "rope_interleave": interleave}
            if (i + j) % 3 == 0:
                fields |= {"rope_yarn": yarn, "rope_scale": 4.0}
            yield Case(
                f"rotary{rotary_dim}of{dim}-{types[j % 4][0]}-{types[j % 4][1]}"
                + "-interleave" * interleave,
                (5, 70, 0, 1, 20),  # the last more than its keys: positions below 0
                (37, 300, 9, 65, 3),
                heads=(6, 2),
                dims=(dim, dim),
                dtypes=types[j % 4],
                variant=Variant(causal=j % 2 == 0, pos_encoding_mode="ROPE_LLAMA", **fields),
                **layouts[j % 3],
            )
        # Few rows: other kernels. With splits, with empty requests.
        yield DECODE.but(
            f"rotary{rotary_dim}of{dim}" + "-interleave" * interleave,
            heads=(6, 2),
            dims=(dim, dim),
            dtypes=types[i % 2],
            kv_layout=("NHD", "HND")[i % 2],
            variant=Variant(
                causal=True,
                pos_encoding_mode="ROPE_LLAMA",
                rotary_dim=rotary_dim,
                rope_interleave=interleave,
                window_left=(-1, 50)[i % 3 == 0],
            ),
            task={"num_workers": 7} if i % 4 == 0 else {},
        )

    for base in (DECODE, PREFILL):  # the largest head dim, on a GPU by one family alone
        for interleave in (False, True):
            yield base.but(
                f"rotary96of512{'-interleave' * interleave}",
                dims=(512, 512),
                dtypes=BF16,
                variant=Variant(
                    causal=True,
                    pos_encoding_mode="ROPE_LLAMA",
                    rotary_dim=96,
                    rope_interleave=interleave,
                ),
            )


def schedule_cases() -> Iterator[Case]:
    """The same work cut in many ways."""
    cuts: list[dict[str, Any]] = [
        *({"num_workers": n} for n in (1, 2, 3, 16)),
        {"fixed_split_size": 1},
        {"fixed_split_size": 37},
        {"fixed_split_size": 4096},
        {"disable_split_kv": True},
        {"disable_split_kv": True, "num_workers": 5},
        {"num_workers": 6, "num_threads": 1},
        {"num_threads": 3},
        {"max_batch_size": 9, "max_q_tokens": 400, "max_kv_pages": 600},
        {"lse_base": "2", "num_workers": 4},
    ]
    for cut in cuts:
        name = "-".join(f"{key}{value}" for key, value in cut.items())
        yield MIXED.but(name, task=cut, layout="paged", variant=Variant(causal=True))
        yield DECODE.but(name, task=cut, heads=(8, 1))
        yield PREFILL.but(name, task=cut, dtypes=BF16)


def extreme_cases() -> Iterator[Case]:
    """Logits around 1e4: one key takes everything, and exp must not overflow."""
    for dtypes in (F32, BF16, F16):
        for base in (MIXED, DECODE, PREFILL):
            yield base.but(
                f"extreme-{dtypes[0]}", dtypes=dtypes, gain=1200.0, task={"num_workers": 5}
            )
        yield MIXED.but(
            f"extreme-sigmoid-{dtypes[0]}",
            dtypes=dtypes,
            gain=1200.0,
            variant=Variant(activation="sigmoid"),
        )


def float8_q_cases() -> Iterator[Case]:
    """Queries in float8: every variant, layout and way to split, at the head dim of models."""
    prefill = Case(
        "float8_q",
        (5, 64, 0, 129, 1),
        (37, 64, 9, 400, 200),
        heads=(8, 2),
        dims=(128, 128),
        dtypes=FP8,
        variant=Variant(causal=True),
        scales="head",
    )
    for i, (name, changes) in enumerate(VARIANTS.items()):
        paged = {"layout": "paged", "kv_layout": ("NHD", "HND")[i // 2 % 2]} if i % 2 else {}
        yield prefill.but(name, **{**paged, "variant": Variant(), "scales": None, **changes})
    for page_size in (1, 8, 16, 64):
        for layout in ("paged", "paged_lens", "table"):
            for stacked in (True, False):
                yield prefill.but(
                    f"{layout}{page_size}-{'stacked' if stacked else 'tuple'}",
                    layout=layout,
                    page_size=page_size,
                    kv_layout="HND" if layout == "table" else "NHD",
                    stacked=stacked,
                )
    yield prefill.but("ragged-HND", kv_layout="HND")
    for scales in ("number", "head"):
        for o in ("bfloat16", "float16", "float32"):
            yield prefill.but(f"{scales}-{o}", scales=scales, dtypes=(*FP8[:2], o))
    for heads in RATIOS:
        yield prefill.but(f"heads{heads[0]}x{heads[1]}", heads=heads)
    for dims in ((64, 64), (256, 256), (40, 40), (128, 64), (48, 112)):
        yield prefill.but(f"dim{dims[0]}x{dims[1]}", dims=dims)
    for task in (
        {"num_workers": 3},
        {"fixed_split_size": 48},
        {"disable_split_kv": True},
        {"max_batch_size": 9, "max_q_tokens": 400, "max_kv_pages": 900},
        {"lse_base": "2", "num_workers": 5},
        {"fp8_accumulation": "fast"},
    ):
        yield prefill.but("-".join(f"{key}{value}" for key, value in task.items()), task=task)
    decode = DECODE.but("float8_q", dtypes=FP8, heads=(8, 1), dims=(128, 128), scales="number")
    yield decode
    yield decode.but("split", task={"num_workers": 7}, scales="head")
    long = Case("float8_q-long", (300,), (3000,), heads=(4, 1), dims=(128, 128), dtypes=FP8)
    for causal in (False, True):
        paged = long.but(f"causal{causal}", variant=Variant(causal=causal), layout="paged")
        yield paged
        yield paged.but("fast", task={"fp8_accumulation": "fast"})
    # Requests of a few tiles and of many, whole and in parts, pages in boxes and row by row.
    fast = Case(
        "float8_q-fast", (70, 1, 0, 33, 200), (2500, 3000, 50, 33, 777), heads=(8, 2),
        dims=(128, 128), dtypes=FP8, variant=Variant(causal=True), layout="paged", scales="head",
        task={"fp8_accumulation": "fast"},
    )  # fmt: skip
    for page_size in (1, 5, 16, 64):
        yield fast.but(f"page{page_size}", page_size=page_size)
    yield fast.but("ragged", layout="ragged", dims=(128, 96))
    yield fast.but("one_worker", task={**fast.task, "num_workers": 1})
    yield fast.but("window", variant=Variant(causal=True, window_left=900))
    for gain in (0.0, 3.0):  # equal weights; scores that climb
        yield fast.but(f"gain{gain}", gain=gain)
    for o in ("float16", "float32"):
        yield fast.but(o, dtypes=(*FP8[:2], o))


def kinds_cases() -> Iterator[Case]:
    """Requests of few rows beside requests of many: on Hopper, two kinds of items in a kernel."""
    both = Case(
        "kinds",
        (1, 70, 1, 0, 2, 150, 1, 1),
        (300, 70, 1, 9, 0, 610, 2000, 17),
        heads=(8, 2),
        dims=(128, 128),
        dtypes=BF16,
        layout="paged",
        variant=Variant(causal=True),
    )
    for page_size in (1, 5, 8, 16, 48, 64):
        kv_layout = "HND" if page_size in (8, 48) else "NHD"
        yield both.but(f"page{page_size}", page_size=page_size, kv_layout=kv_layout)
    yield both.but("ragged", layout="ragged")
    yield both.but("ragged-HND", layout="ragged", kv_layout="HND", dtypes=F16)
    for dims in ((64, 64), (40, 40), (112, 112), (128, 64)):
        yield both.but(f"dim{dims[0]}x{dims[1]}", dims=dims, dtypes=F16, stacked=dims[0] == dims[1])
    for heads in ((3, 3), (6, 2), (8, 1)):
        yield both.but(f"heads{heads[0]}x{heads[1]}", heads=heads)
    yield both.but("all", variant=Variant())
    yield both.but("window", variant=Variant(causal=True, window_left=333))
    yield both.but("sinks", sinks="extreme", scales="head", dtypes=F16)
    yield both.but("lse2-float32", task={"lse_base": "2"}, dtypes=(*BF16[:2], "float32"))
    yield both.but("extreme", gain=1200.0)
    # Splits of narrow items, and more items in a queue than shared memory holds at once.
    yield both.but("long", q_lens=(90, 1, 2), kv_lens=(90, 30_000, 9000), heads=(4, 1))
    many = tuple(1 + i * 7 % 40 for i in range(700))
    yield both.but("many", q_lens=(90, *(1,) * 700), kv_lens=(200, *many), heads=(8, 8))


def matrix() -> list[Case]:
    """All of them."""
    makers = (
        dims_cases,
        dtype_cases,
        head_cases,
        layout_cases,
        variant_cases,
        bounds_cases,
        length_cases,
        position_cases,
        rotary_cases,
        schedule_cases,
        extreme_cases,
        float8_q_cases,
        kinds_cases,
    )
    return [case for maker in makers for case in maker()]
