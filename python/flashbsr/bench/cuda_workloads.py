# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The named workloads of ``flashbsr bench --device cuda``: shapes and goals.

Goals in microseconds were set on an H200 that reads 4.55 TB/s; ``us_scaled`` is the time that the
device would take at that bandwidth, so units that differ by a few percent are judged alike. Goals
in TFLOP/s, and those of variants and block-sparse patterns, are for compute capability 9.0: one
H200.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .workloads import WORKLOADS, ZIPF_1024, Goal, Workload

__all__ = ["CUDA_KINDS", "CUDA_WORKLOADS", "REFERENCE_READ_GBS"]

#: Read bandwidth of the device that the goals in microseconds are for.
REFERENCE_READ_GBS = 4550.0

#: kind -> the heading of its block in the table.
CUDA_KINDS = {
    "gpu-decode": "Decode, bf16, paged",
    "gpu-fp8": "Decode, e4m3 K/V, paged",
    "gpu-codes": "Decode, K/V of 8 and 4 bits with scales of every token and head, paged",
    "gpu-codes-extend": "Chunks of prompts over K/V of 8 and 4 bits with scales, causal, paged",
    "gpu-prefill": "Prefill, causal, bf16",
    "gpu-variants": "Prefill, other masks, head dims and variants, bf16, ragged",
    "gpu-prefill-fp8": "Prefill, causal, e4m3",
    "gpu-short": "Few queries on a long KV, causal, bf16, paged",
    "gpu-chunk": "Prefill chunks on a long KV, causal, bf16",
    "gpu-bounds": "Layers of a step, lengths and tables on the device, bf16, paged",
    "gpu-update": "update(), decode, host time",
    "gpu-mixed": "Prefill chunks and decodes in one run, causal, paged",
    "gpu-mla": "Multi-head latent attention, absorbed, paged, bf16 or caches of 8 bits",
    "gpu-sparse": "Block-sparse, random blocks, bf16",
    "gpu-share": "Decode of requests that share prefixes, bf16, paged",
    "gpu-append": "append_paged_kv_cache, bf16",
    "gpu-append-slots": "append_paged_kv_cache by slot_mapping, bf16",
    "gpu-append-codes": "append_paged_kv_cache by slot_mapping, bf16 to codes of 8 and 4 bits",
    "gpu-merge": "merge_states, bf16",
    "gpu-plan": "plan(), host time",
    "gpu-plan-bounds": "plan() of bounds, decode, host time",
    "gpu-run": "run(), host time of the call",
}

#: 16 lengths, uniform between 512 and 1024.
UNIFORM_1024 = (
    *(993, 593, 669, 843, 554, 788, 561, 533),
    *(721, 945, 960, 512, 657, 1018, 538, 629),
)


def _at_most(metric: str, bound: float | None) -> tuple[Goal, ...]:
    return () if bound is None else (Goal(metric, bound, at_least=False),)


def _decode(name: str, kv_lens: tuple[int, ...], us: float | None, **changes: object) -> Workload:
    fields: dict[str, object] = {
        "kind": "gpu-decode",
        "page_size": 16,
        "goals": _at_most("us_scaled", us),
        # A dense peer needs equal lengths.
        "peer": len(set(kv_lens)) == 1 and "kv_dtype" not in changes,
        **changes,
    }
    return Workload(name, dtype="bfloat16", q_lens=(1,) * len(kv_lens), kv_lens=kv_lens, **fields)  # type: ignore[arg-type]


def _page_one(name: str, kv_lens: tuple[int, ...]) -> Workload:
    """Pages of one token, against pages of 16 in the same run."""
    goals = (Goal("page_penalty", 0.04, at_least=False),)
    return _decode(name, kv_lens, None, page_size=1, goals=goals, peer=False)


def _fp8(name: str, kv_lens: tuple[int, ...], us: float | None, quick: bool = False) -> Workload:
    return _decode(name, kv_lens, us, kind="gpu-fp8", kv_dtype="float8_e4m3fn", quick=quick)


def _codes(name: str, kv_lens: tuple[int, ...], us: float, **changes: object) -> Workload:
    return _decode(name, kv_lens, us, kind="gpu-codes", kv_dtype=_code_type(name), **changes)


def _code_type(name: str) -> str:
    if "e4m3" in name:
        return "float8_e4m3fn"
    return {"kv8": "int8", "kv4": "int4", "nvfp4": "nvfp4"}[name.split("-")[0]]


def _extend_codes(name: str, fraction: float | None, batch: int = 4, q_len: int = 512) -> Workload:
    """Put queries on 8192 tokens, against K and V of 16 bits in the same run."""
    changes = {"kind": "gpu-codes-extend", "kv_dtype": _code_type(name)}
    goals = () if fraction is None else _at_least("kv16_fraction", fraction)
    return _short(f"extend-{name}-{batch}x{q_len}", batch, q_len, 8192, goals, **changes)


def _mla(
    name: str, requests: int, kv_len: int, us: float | None, heads: int = 128, **changes: Any
) -> Workload:
    """Decode over latents of 512 dims and rotated keys of 64."""
    fields = {"page_size": 64, "head_dim": 576, "num_kv_heads": 1, "num_qo_heads": heads}
    return _decode(
        f"mla-{name}", (kv_len,) * requests, None, kind="gpu-mla", peer=False,
        **(fields | {"goals": _at_most("us", us)} | changes),
    )  # fmt: skip


def _mla_sparse(name: str, queries: int, caches: int, tflops: float, **changes: Any) -> Workload:
    """2048 of 32768 tokens for each query, of a cache of its own or of one for all."""
    goals = _at_least("tflops", tflops)
    return _mla(
        f"sparse-{name}", queries, 2048, None, page_size=1, chosen_from=(caches, 32768),
        goals=goals, **changes,
    )  # fmt: skip


def _at_least(metric: str, bound: float) -> tuple[Goal, ...]:
    return (Goal(metric, bound),)


def _prefill(
    name: str, lengths: tuple[int, ...], goals: tuple[Goal, ...], **changes: Any
) -> Workload:
    """Causal, bf16, all of a request's tokens at once, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "kind": "gpu-prefill",
        "dtype": "bfloat16",
        "q_lens": lengths,
        "causal": True,
        **changes,
    }
    return Workload(f"prefill-{name}", kv_lens=lengths, goals=goals, **fields)


def _both(
    name: str,
    lengths: tuple[int, ...],
    ragged: float,
    paged: float,
    penalty: tuple[Goal, ...] = (),
    *,
    quick: bool = False,
) -> tuple[Workload, Workload]:
    """Ragged, next to PyTorch where lengths are equal, and in pages of 16; TFLOP/s."""
    peer = len(set(lengths)) == 1
    goals = (*_at_least("tflops", paged), *penalty)
    return (
        _prefill(name, lengths, _at_least("tflops", ragged), peer=peer, quick=quick),
        _prefill(f"paged-{name}", lengths, goals, page_size=16, quick=quick),
    )


def _option(name: str, tflops: float, **changes: Any) -> Workload:
    """4 x 4096, ragged, with another mask or head dim."""
    return _prefill(
        f"{name}-4x4096", _LONG, _at_least("tflops", tflops), kind="gpu-variants", **changes
    )


def _variant(variant: str, penalty: float, *, quick: bool = False) -> Workload:
    """4 x 4096, ragged, against the same without the variant."""
    goals = _at_most("variant_penalty", penalty)
    name = f"{variant}-4x4096"
    return _prefill(name, _LONG, goals, kind="gpu-variants", variant=variant, quick=quick)


def _e4m3(
    batch: int, length: int, tflops: float, accumulation: str = "default", *, quick: bool = False
) -> Workload:
    """All of q, K and V in e4m3."""
    fast = "fast-" if accumulation == "fast" else ""
    return _prefill(
        f"e4m3-{fast}{batch}x{length}",
        (length,) * batch,
        _at_least("tflops", tflops),
        kind="gpu-prefill-fp8",
        dtype="float8_e4m3fn",
        fp8_accumulation=accumulation,
        quick=quick,
    )


def _short(
    name: str, batch: int, q_len: int, kv_len: int, goals: tuple[Goal, ...], **changes: Any
) -> Workload:
    """Ask for the last `q_len` tokens of each request."""
    fields: dict[str, Any] = {"kind": "gpu-short", "page_size": 16, "causal": True, **changes}
    lens: dict[str, Any] = {"q_lens": (q_len,) * batch, "kv_lens": (kv_len,) * batch}
    return Workload(name=name, dtype="bfloat16", goals=goals, **lens, **fields)


def _mixed(cache: str = "", *goals: Goal) -> Workload:
    """Chunks of prompts, each followed by its share of decodes, all over as many tokens."""
    chunks, chunk, decodes, kv_len = 4, 512, 60, 4096
    kinds: dict[str, Any] = {"kind": "gpu-mixed"}
    if cache == "e4m3kv":
        kinds["kv_dtype"] = "float8_e4m3fn"
    elif cache:
        kinds = {"kind": "gpu-codes-extend", "kv_dtype": _code_type(cache)}
    q_lens = (chunk, *(1,) * (decodes // chunks)) * chunks
    return Workload(
        name=f"mixed-{cache}{'-' * bool(cache)}{chunks}x{chunk}-{decodes}",
        dtype="bfloat16",
        q_lens=q_lens,
        kv_lens=(kv_len,) * len(q_lens),
        page_size=16,
        causal=True,
        goals=goals,
        **kinds,
    )


def _chunks(
    batch: int, q_len: int, kv_len: int, ragged: float | None, paged: float, heads: str = ""
) -> list[Workload]:
    """Ragged, unless that is not asked for, and in pages of 16; microseconds. `heads`: "28x4"."""
    ending = f"-{heads}" if heads else ""
    qo, kv = map(int, heads.split("x")) if heads else (32, 8)
    rows = []
    for prefix, page_size, us in (("chunk", None, ragged), ("chunk-paged", 16, paged)):
        if us is None:
            continue
        one = _short(
            f"{prefix}-{batch}x{q_len}-{kv_len}{ending}", batch, q_len, kv_len, _at_most("us", us),
            num_qo_heads=qo, num_kv_heads=kv, peer=page_size is None,
        )  # fmt: skip
        rows.append(replace(one, kind="gpu-chunk", page_size=page_size))
    return rows


def _bounds(w: Workload, name: str) -> Workload:
    """Take the lengths and tables of another workload on the device, planned by bounds."""
    goals = (*_at_most("over_planned", 0.02), *_at_most("over_planned_half", 0.10))
    return replace(w, name=name, kind="gpu-bounds", goals=goals, peer=False, quick=False)


def _sparse(r: int, c: int, us: float, *, quick: bool = False) -> Workload:
    """8192 queries by 8192 keys, a quarter of the blocks."""
    return Workload(
        name=f"sparse-{r}x{c}",
        kind="gpu-sparse",
        dtype="bfloat16",
        q_lens=(8192,),
        kv_lens=(8192,),
        block=(r, c),
        quick=quick,
        goals=_at_most("us", us),
    )


def _share(
    name: str, batch: int, own: int, prefixes: tuple[tuple[int, int], ...], goals: tuple[Goal, ...]
) -> Workload:
    """`batch` decodes that share levels of prefixes and have `own` tokens more."""
    length = own + sum(tokens for _, tokens in prefixes)
    fields = {"kind": "gpu-share", "prefixes": prefixes, "goals": goals, "peer": False}
    return _decode(f"share-{name}", (length,) * batch, None, **fields)


def _append(length: int, kind: str = "append", fraction: float = 0.95) -> Workload:
    return Workload(
        name=f"{kind}-16x{length}",
        kind=f"gpu-{kind}",
        dtype="bfloat16",
        q_lens=(length,) * 16,
        kv_lens=(length,) * 16,
        page_size=16,
        quick=length == 1024,
        goals=(Goal("copy_fraction", fraction),),
    )


def _append_codes(name: str) -> Workload:
    return replace(
        _append(8192, f"append-{name}", 0.9), kind="gpu-append-codes", kv_dtype=_code_type(name)
    )


def _merge(rows: int, states: int) -> Workload:
    return Workload(
        name=f"merge-states-{rows}x{states}",
        kind="gpu-merge",
        dtype="bfloat16",
        q_lens=(rows,),
        kv_lens=(rows,),
        states=states,
        quick=states == 4,
        goals=(Goal("copy_fraction", 0.95),),
    )


def _plan(batch: int, bound_us: float) -> Workload:
    # 512 to 1536 tokens in an order without structure, mean about 1024.
    lengths = tuple(512 + (i * 397 + 101) % 1025 for i in range(batch))
    goals = _at_most("plan_us", bound_us)
    name = f"plan-{batch}"
    return _decode(name, lengths, None, kind="gpu-plan", peer=False, quick=True, goals=goals)


def _host_plan(name: str, bound_us: float) -> Workload:
    """As on the CPU."""
    workload = next(w for w in WORKLOADS if w.name == name)
    return replace(workload, kind="gpu-plan", goals=_at_most("plan_us", bound_us))


_LONG = (4096,) * 4
_PAGED = (Goal("paged_penalty", 0.04, at_least=False),)

CUDA_WORKLOADS: tuple[Workload, ...] = (
    _decode("decode-16x8192", (8192,) * 16, 124.5, quick=True),
    _decode("decode-64x4096", (4096,) * 64, 247.0),
    _decode("decode-1x131072", (131072,), 125.5),
    _decode("decode-128x1024", (1024,) * 128, 125.0),
    _decode("decode-mha-16x4096", (4096,) * 16, 246.0, num_kv_heads=32),
    _decode("decode-gqa8-16x4096", (4096,) * 16, 64.0, num_qo_heads=64),
    _page_one("decode-page1-16x8192", (8192,) * 16),
    _page_one("decode-page1-16x1024", (1024,) * 16),
    _decode("decode-16x1024", (1024,) * 16, 17.8, quick=True),
    _decode("decode-uniform", UNIFORM_1024, 15.5),
    _decode("decode-zipf", ZIPF_1024, 19.0, quick=True),
    _decode("decode-skewed", (512,) * 31 + (131072,) + (512,) * 32, 158.0, quick=True),
    _fp8("fp8-16x8192", (8192,) * 16, 67.0, quick=True),
    _fp8("fp8-64x4096", (4096,) * 64, 131.0),
    _fp8("fp8-16x1024", (1024,) * 16, 11.0),
    _fp8("fp8-uniform", UNIFORM_1024, None),
    _fp8("fp8-zipf", ZIPF_1024, 13.5),
    _codes("kv8-16x8192", (8192,) * 16, 68.0),
    _codes("kv8-64x4096", (4096,) * 64, 134.0),
    _codes("kv8-e4m3-16x8192", (8192,) * 16, 68.0),
    _codes("kv8-e4m3-64x4096", (4096,) * 64, 134.0),
    _codes("kv4-16x8192", (8192,) * 16, 42.0),
    _codes("kv4-64x4096", (4096,) * 64, 80.0),
    _codes("nvfp4-16x8192", (8192,) * 16, 44.0),
    _codes("nvfp4-64x4096", (4096,) * 64, 84.0),
    _codes("kv4-hnd-16x8192", (8192,) * 16, 42.0, kv_layout="HND"),
    _codes("nvfp4-hnd-16x8192", (8192,) * 16, 44.0, kv_layout="HND"),
    _extend_codes("kv8", 0.9),
    _extend_codes("kv8-e4m3", 0.9),
    _extend_codes("kv4", 0.8),
    _extend_codes("nvfp4", 0.8),
    *(
        _extend_codes(name, None, batch, q_len)
        for name in ("kv8", "kv8-e4m3")
        for batch, q_len in ((16, 64), (1, 2048))
    ),
    *_both("1x8192", (8192,), 785.0, 775.0),
    *_both("4x4096", _LONG, 755.0, 745.0, _PAGED, quick=True),
    *_both("1x32768", (32768,), 745.0, 735.0),
    *_both("16x1024", (1024,) * 16, 590.0, 585.0),
    *_both("uniform", UNIFORM_1024, 480.0, 475.0),
    *_both("zipf", ZIPF_1024, 670.0, 660.0),
    _prefill("page1-4x4096", _LONG, _at_least("tflops", 690.0), page_size=1),
    _option("no-mask", 765.0, causal=False, peer=True),
    _option("d64", 560.0, head_dim=64, peer=True),
    _option("d256", 765.0, head_dim=256, peer=True),
    _option("window", 590.0, window_left=1023),
    _variant("soft-cap", 0.12, quick=True),
    _variant("alibi", 0.05),
    _variant("sinks", 0.05),
    _variant("mask", 0.05),
    _variant("sigmoid", 0.05),
    _e4m3(4, 4096, 880.0, quick=True),
    _e4m3(1, 32768, 860.0),
    _e4m3(4, 4096, 985.0, "fast"),
    _e4m3(1, 32768, 975.0, "fast"),
    _prefill(
        "paged-e4m3kv-4x4096",
        _LONG,
        _at_least("kv16_fraction", 0.9),
        kind="gpu-prefill-fp8",
        kv_dtype="float8_e4m3fn",
        page_size=16,
    ),
    *(
        _short(
            f"extend-e4m3kv-{batch}x{q_len}",
            batch,
            q_len,
            8192,
            (),
            kind="gpu-prefill-fp8",
            kv_dtype="float8_e4m3fn",
        )
        for batch, q_len in ((4, 512), (16, 64))
    ),
    _short("extend-4x512", 4, 512, 8192, _at_least("tflops", 730.0)),
    _short("verify-16x4", 16, 4, 4096, _at_most("us_scaled", 65.0), quick=True),
    _short("tree-16x8", 16, 8, 4096, _at_most("variant_penalty", 0.05), variant="tree"),
    *_chunks(1, 512, 4096, 50.0, 53.0),
    *_chunks(1, 512, 8192, 92.0, 95.0),
    *_chunks(1, 256, 30000, 178.0, 182.0),
    *_chunks(2, 256, 30000, 345.0, 352.0),
    *_chunks(3, 256, 8192, 195.0, 200.0),
    *_chunks(3, 256, 30000, 565.0, 575.0),
    *_chunks(4, 128, 16384, 190.0, 195.0),
    *_chunks(16, 64, 8192, 205.0, 210.0),
    *_chunks(5, 200, 12345, 285.0, 292.0, "28x4"),
    *_chunks(6, 128, 30000, None, 640.0),
    *_chunks(13, 64, 30000, None, 770.0),
    _bounds(_decode("", (1024,) * 16, None), "bounds-16x1024"),
    _bounds(_decode("", (8192,) * 16, None), "bounds-16x8192"),
    _bounds(_decode("", (4096,) * 64, None), "bounds-64x4096"),
    _bounds(_fp8("", (8192,) * 16, None), "bounds-e4m3-16x8192"),
    _bounds(_short("", 3, 256, 30000, ()), "bounds-chunk-3x256-30000"),
    _decode(
        "update-64",
        (1024,) * 64,
        None,
        kind="gpu-update",
        peer=False,
        goals=_at_most("update_us", 15.0),
    ),
    _mixed("", *_at_least("apart_gain", 1.25), *_at_most("over_larger", 1.05)),
    _mixed("e4m3kv", *_at_least("apart_gain", 0.95)),
    _mixed("kv8"),
    _mixed("kv4"),
    _share("64x8192-own-256", 64, 256, ((1, 8192),), _at_most("us", 33.0)),
    _share("three-levels", 128, 512, ((1, 4096), (8, 2048)), _at_least("sharing_gain", 3.0)),
    _share("nothing", 64, 4096, (), _at_least("sharing_gain", 0.98)),
    _mla("64x8192", 64, 8192, 205.0, quick=True),
    _mla("16x8192", 16, 8192, 62.0),
    _mla("64x1024", 64, 1024, 34.0),
    _mla("16x1024", 16, 1024, 16.0),
    _mla("1x8192", 1, 8192, 17.0),
    _mla("1x1024", 1, 1024, 9.0),
    _mla("page-1-64x8192", 64, 8192, None, page_size=1, goals=_at_most("page_penalty", 0.05)),
    _mla("h16-64x8192", 64, 8192, 148.0, 16),
    _mla("e4m3-64x8192", 64, 8192, 236.0, kv_dtype="float8_e4m3fn"),
    _mla("e4m3-h16-64x8192", 64, 8192, None, 16, kv_dtype="float8_e4m3fn"),
    _mla("ds656-64x8192", 64, 8192, 236.0, kv_dtype="fp8_ds_mla"),
    _mla("ds656-h16-64x8192", 64, 8192, 95.0, 16, kv_dtype="fp8_ds_mla"),
    _mla_sparse("64", 64, 64, 450.0),
    _mla_sparse("ds656-64", 64, 64, 450.0, kv_dtype="fp8_ds_mla"),
    _mla_sparse("prefill-4096", 4096, 1, 640.0),
    replace(_mla("2-tokens-64x8192", 64, 8192, 390.0), q_lens=(2,) * 64, causal=True),
    _sparse(128, 128, 420.0, quick=True),
    _sparse(128, 16, 440.0),
    _sparse(64, 64, 520.0),
    _sparse(16, 16, 700.0),
    _append(1024),
    _append(8192),
    _append(8192, "append-slots", 0.93),
    _append_codes("kv8"),
    _append_codes("kv8-e4m3"),
    _append_codes("kv4"),
    _append_codes("nvfp4"),
    _merge(16384, 4),
    _merge(4096, 16),
    _plan(16, 15.0),
    _plan(1024, 100.0),
    _plan(4096, 350.0),
    _host_plan("plan-ragged-256", 200.0),
    _host_plan("plan-shared-1024", 400.0),
    _decode(
        "plan-bounds-64",
        tuple(1024 + 16 * i for i in range(64)),
        None,
        kind="gpu-plan-bounds",
        peer=False,
        goals=_at_most("plan_us", 20.0),
    ),
    _decode(
        "run-host",
        (256,) * 16,
        None,
        kind="gpu-run",
        peer=False,
        quick=True,
        goals=_at_most("host_us", 10.0),
    ),
)
