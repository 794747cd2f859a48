# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a small problem through every CUDA kernel that this device can reach, by the public API.

For compute-sanitizer (tools/gpu_record.py runs it), and useful alone as a smoke test. Shapes, types
and options lead to each row of the registry; it prints ``ran <kernel>`` for each, and ``not run:``
for a row that its problem did not lead to, with what ran instead, or whose problem failed. Arrays
are PyTorch's; its allocator should not pool (PYTORCH_NO_CUDA_MEMORY_CACHING=1), or what is out of
bounds is not seen.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable
from typing import Any

import flashbsr
import numpy as np
import sanitizer_codes
import sanitizer_merges
import sanitizer_rotations
import torch
from flashbsr.info import engine_info
from sanitizer_kernels import compiled, reachable

DEVICE = "cuda"
GROUP = 4  # query heads of a KV head
LATENT = ("latent", "latent_codes", "latent_packed")
FEW_LATENT = ("latent_few", "latent_few_packed")
# Family and rows of a tile -> query tokens of a request that fill it on average.
FEW, MANY = (10, 17, 5, 12), (60, 17, 90, 33)
# Requests that tiles of so many rows hold best.
MIXED = {128: (64, 1, 2, 32), 192: (90, 1, 2, 45)}
MIXED_SHARING = {128: (2, 1, 1, 2), 192: (1197, 1, 1, 1)}  # fewer do not fill 132 SMs
TOKENS = {
    ("decode", 8): (1, 1, 1, 1),
    ("decode", 16): (4, 3, 4, 3),
    ("decode_scaled", 8): (1, 1, 1, 1),
    ("decode_pairs", 8): (1, 1, 1, 1),
    ("decode_pairs_gather", 8): (1, 1, 1, 1),
    ("prefill", 128): MANY,
    ("prefill_scaled", 128): MANY,
    ("hopper", 128): FEW,  # the choice is between 128 and 192 rows
    **{(family, 192): MANY for family in ("hopper", "hopper_fast", "hopper_scaled")},
    ("hopper_scaled", 128): MANY,
    **{(family, 64): FEW for family in ("prefill", "prefill_scaled", "latent_mma", *LATENT)},
    **{(family, 16): (1, 2, 2, 1) for family in ("latent_mma", "latent_mma_packed", *FEW_LATENT)},
    ("latent_mma", 32): (4, 3, 4, 3),
    **{(family, rows): MIXED[rows] for family in ("mixed", "mixed_gather") for rows in MIXED},
}
# Families that copy with TMA where it serves; mixed_gather is for where it does not.
PASSED = ("hopper_scaled", "hopper_halves")  # over codes that a pass has widened, of the latter all
HOPPER = ("hopper", "hopper_fast", *PASSED, *LATENT, *FEW_LATENT, "mixed", "mixed_gather")
KV_LENS = (70, 17, 100, 300)
LONG = (70, 17, 100, 5000)  # alone on a GPU: split
PAGE_SIZE = 16
GATHERED = 9  # a page size whose boxes would be of too few tokens for the copy engine of sm_90
TYPES = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
TYPES |= {"i8": "int8", "i4": "int4", "e2m1": "nvfp4"}
# What requests share, all of them (tokens) and halves (pages), and the pages that each owns: a part
# that is long enough to be split; requests in one part and in two, with KV of their own and none.
SHARED, HALVES, OWN = 2100, (3, 0), (2, 0, 1, 5)
# Fields of AttentionSpec that need a variant; ``mask`` asks for a custom mask,
# ``tree`` for one of the last columns, ``levels`` for requests that share.
SPECS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({"causal": True}, {"window_left": 40}, {"levels": True}),
    "soft_cap": ({"logits_soft_cap": 5.0, "window_left": 50}, {"logits_soft_cap": 50.0}),
    "alibi": ({"pos_encoding_mode": "ALIBI", "causal": True},),
    "standard": (
        {"logits_soft_cap": 5.0, "pos_encoding_mode": "ALIBI", "window_left": 50},
        {"pos_encoding_mode": "ROPE_LLAMA", "causal": True},
        {"mask": True},
        {"tree": True},
    ),
    "sigmoid_alone": (
        {"activation": "sigmoid", "causal": True},
        {"activation": "sigmoid"},
        {"activation": "sigmoid", "levels": True},
    ),
    "sigmoid": (
        {"activation": "sigmoid", "logits_soft_cap": 5.0, "causal": True},
        {"activation": "sigmoid", "mask": True},
        {"activation": "sigmoid", "logits_soft_cap": 5.0, "levels": True},
    ),
}
OPTIONS = ("mask", "tree", "levels")


def offsets(lens: tuple[int, ...]) -> np.ndarray:
    """Offsets of consecutive runs."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def by_price(kernel: dict[str, Any]) -> bool:
    """Whether a row is for batches that its tiles hold better than the usual ones do."""
    return bool(kernel["family"] == "hopper" and kernel["rows"] == kernel["head_dim"] == 128)


def rotates(kernel: dict[str, Any], page_size: int | None) -> bool:
    """Whether a problem with RoPE leads to the kernel: not where dims differ."""
    if kernel["family"] == "hopper":
        return kernel["kv"] in ("f16", "bf16") and kernel["head_dim"] == kernel["head_dim_vo"]
    if kernel["family"] == "decode":
        return kernel["kv"] in ("f16", "bf16") and kernel["head_dim"] <= 256
    return kernel["family"] == "prefill" and page_size is not None


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers on the GPU, made on the host: fewer foreign kernels under the sanitizer."""
    x = torch.randn(shape)
    return x.to(getattr(torch, dtype)).to(DEVICE)


def cache_of(shape: tuple[int, ...], dtype: str, scaled: bool, group: int = 32) -> tuple[Any, Any]:
    """K or V, and where it is codes, their scales, of `group` for int4."""
    if dtype == "fp8_ds_mla":
        rows = np.zeros((1, int(np.prod(shape[:-1])), 656), np.uint8)
        slots = np.arange(rows.shape[1])
        latents = (torch.randn(len(slots), n).numpy() for n in (512, 64))
        flashbsr.append_packed_latents(*latents, cache=rows, slot_mapping=slots)
        return integers(rows.reshape(*shape[:-1], 656)), None
    if not scaled:
        return normal(shape, dtype), None
    scales = shape[:-1]
    if dtype in ("int4", "nvfp4"):
        *rows, dim = shape
        scales = (*rows, dim // (group if dtype == "int4" else 16))
        codes = integers(np.random.default_rng(2).integers(0, 256, (*rows, dim // 2), np.uint8))
    elif dtype == "int8":
        codes = integers(np.random.default_rng(2).integers(-127, 128, shape, np.int8))
    else:
        codes = normal(shape, dtype)
    numbers = normal(scales, "float32").abs()
    return codes, numbers.to(torch.float8_e4m3fn) if dtype == "nvfp4" else numbers * 0.01


def integers(x: Any) -> Any:
    """Whole numbers on the GPU."""
    return torch.from_numpy(np.asarray(x)).to(DEVICE)


def plan_levels(attention: flashbsr.Attention, q_lens: tuple[int, ...], page_size: int) -> int:
    """Plan requests that share; how many pages they have."""
    groups = ((sum(q_lens),), (sum(q_lens[:2]), sum(q_lens[2:])), q_lens)
    counts = ((-(-SHARED // page_size),), HALVES, OWN)
    table = [offsets(level) for level in counts]
    first = offsets(tuple(int(level[-1]) for level in table))
    pages = np.random.default_rng(1).permutation(int(first[-1])).astype(np.int32)
    attention.plan(
        flashbsr.Levels(
            [offsets(level) for level in groups],
            table,
            np.split(pages, first[1:-1]),
            [np.full(len(level), page_size - 3, np.int32) for level in counts],
            page_size=page_size,
        )
    )
    if attention.plan_info.header.num_shared != 2:
        raise RuntimeError("levels are not shared")
    return len(pages)


def attend(kernel: dict[str, Any], spec: dict[str, Any], page_size: int | None) -> str:
    """Run a problem for `kernel`, ragged without a page size; the name of the kernel that ran."""
    family, rows = kernel["family"], kernel["rows"]
    levels = bool(spec.get("levels"))
    shares_mixed = levels and family.startswith("mixed")
    q_lens = MIXED_SHARING[rows] if shares_mixed else TOKENS[family, rows]
    # Splits and merges in one half of the problems, whole tiles in the other. Fixed splits choose
    # the kernel too: the smallest, or one for 64 rows.
    chosen_by_rows = rows in (16, 32) or q_lens in (MANY, *MIXED.values()) or by_price(kernel)
    fixed = page_size is not None and not chosen_by_rows and not levels
    kv_lens = LONG if page_size and not fixed and not by_price(kernel) else KV_LENS
    q_type, _, kv_type = kernel["kv"].rpartition("x")
    k_type, _, v_type = kv_type.partition("_")
    kv_dtype, q_dtype = TYPES[k_type], TYPES[q_type or k_type]
    v_dtype = TYPES[v_type or k_type]
    if kv_dtype.startswith("float8") and family not in HOPPER:
        q_dtype = "bfloat16" if page_size else "float16"
    pairs = family.startswith("decode_pairs")
    scaled = family.endswith("_scaled") or pairs
    if scaled and not q_type:
        q_dtype = "bfloat16" if page_size else "float16"
    # Smaller dims than the kernel's are padded by it; with RoPE inside they may not be.
    dim = kernel["head_dim"]
    latent = family.startswith("latent")
    kv_dtype = "fp8_ds_mla" if family.endswith("_packed") else kv_dtype
    exact = page_size or latent or {kv_dtype, v_dtype} & {"int4", "nvfp4"}
    dim_vo = kernel["head_dim_vo"] - (0 if exact else 32)
    # Packed codes of one KV head, of which there is no pair.
    alone = family == "decode_scaled" and kernel["kv"] in ("i4", "e2m1")
    kv_heads = 1 if latent or alone else 2
    fields = {"sm_scale": 0.05} if latent else {}
    fields |= {name: value for name, value in spec.items() if name not in OPTIONS}
    backend = {"cuda": "fa3" if family in HOPPER else "fa2"}.get(DEVICE, DEVICE)
    # Under a capacity latents do not merge within clusters.
    capacity = (levels and not shares_mixed) or (latent and "window_left" in spec)
    capacity |= pairs  # so few requests read one head at a time otherwise
    # So few requests are priced to be faster by other kernels.
    asked = family.startswith("mixed") or (family == "hopper" and rows == 192) or by_price(kernel)
    asked = asked or family == "hopper_scaled"
    asked = ((asked and not capacity) or latent) and DEVICE != "cpu"
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(**fields),
        flashbsr.TaskInfo(
            num_qo_heads=2 * GROUP,
            num_kv_heads=kv_heads,
            head_dim_qk=dim,
            head_dim_vo=dim_vo,
            latent=latent,
            backend=backend,
            q_dtype=q_dtype,
            kv_dtype=(kv_dtype, v_dtype) if v_type else kv_dtype,
            fixed_split_size=3 * page_size if fixed and page_size else None,
            tile_rows=rows if asked else None,
            check=page_size is not None,
            fp8_accumulation="fast" if family == "hopper_fast" else "default",
            # Sharing may choose another kernel, but not under a capacity.
            max_batch_size=len(q_lens) if capacity else None,
            max_q_tokens=sum(q_lens) if capacity else None,
            max_kv_pages=len(q_lens) * SHARED if capacity else None,
        ),
    )
    masks: dict[str, Any] = {}
    if spec.get("mask"):
        size = sum(q * kv for q, kv in zip(q_lens, kv_lens, strict=True))
        masks["custom_mask"] = np.random.default_rng(0).random(size) < 0.5
    if spec.get("tree"):
        masks["tree_parents"] = np.concatenate([np.arange(-1, n - 1) // 2 for n in q_lens])
    qo_indptr = None if rows == 8 else offsets(q_lens)
    q = normal((sum(q_lens), 2 * GROUP, dim), q_dtype)
    if page_size and levels:
        shape: tuple[int, ...] = (plan_levels(attention, q_lens, page_size), page_size, kv_heads)
    elif page_size:
        pages = offsets(tuple(-(-n // page_size) for n in kv_lens))
        shape = (int(pages[-1]), page_size, kv_heads)
        indices = np.random.default_rng(1).permutation(shape[0]).astype(np.int32)
        lens = np.array(kv_lens, np.int32)
        # Half of the kernels without masks: items and parts that lengths leave empty.
        bounds = kernel["kv"] in ("bf16", "e4m3", "i8", "i8_i4") and "custom_mask" not in masks
        if bounds and not (fixed and spec.get("window_left", -1) >= 0):
            layout: Any = flashbsr.Bounds(qo_indptr, lens, page_size=page_size)
            attention.plan(layout, **masks)
            shorter = lens * 3 // 4 if "tree_parents" not in masks else lens
            now = integers(np.where(np.arange(len(lens)) == 1, 0, shorter))
            attention.update(now, kv_indptr=pages, kv_indices=integers(indices))
        else:
            layout = flashbsr.Paged(qo_indptr, pages, indices, kv_lens=lens, page_size=page_size)
            attention.plan(layout, **masks)
    else:
        shape = (sum(kv_lens), kv_heads)
        attention.plan(flashbsr.Ragged(qo_indptr, offsets(kv_lens)), **masks)
    group = 64 if family == "decode_pairs" else 32  # boxes have two scales of a head
    kv, k_scale = cache_of((*shape, dim), kv_dtype, scaled, group)
    v, v_scale = (None, None) if latent else cache_of((*shape, dim_vo), v_dtype, scaled, group)
    kv = kv if latent else (kv, v)
    lse = spec.get("activation") != "sigmoid"
    # initcheck does not follow bulk stores, by which this family writes: NaN until it wrote.
    out_dtype = "bfloat16" if q_dtype.startswith("float8") else q_dtype
    out = None
    if family in HOPPER:
        out = normal((*q.shape[:2], dim_vo), out_dtype).fill_(float("nan"))
    result = attention.run(q, kv, out=out, return_lse=lse, k_scale=k_scale, v_scale=v_scale)
    o = result[0] if lse else result
    if not bool(torch.isfinite(o.float().cpu()).all()):
        raise RuntimeError(f"{kernel['name']}: the output is not finite")
    return str(attention._engine.kernel_name())


def append(dtype: str) -> None:
    """Three requests grow by some tokens; the last row is padding."""
    lens, new = (33, 5, 16), (30, 1, 16)
    pages = offsets(tuple(-(-n // PAGE_SIZE) for n in lens))
    cache = normal((int(pages[-1]), 2, PAGE_SIZE, 2, 64), dtype)
    rows = normal((sum(new) + 1, 2, 64), "bfloat16")
    indptr, kv_lens = (
        torch.from_numpy(x).to(DEVICE) for x in (offsets(new), np.array(lens, np.int32))
    )
    where = flashbsr.get_batch_indices_positions(indptr, kv_lens, sum(new) + 1)
    last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in lens], dtype=torch.int32).to(DEVICE)
    table = (
        torch.arange(int(pages[-1]), dtype=torch.int32).to(DEVICE),
        torch.from_numpy(pages).to(DEVICE),
    )
    flashbsr.append_paged_kv_cache(rows, rows, *where, cache, *table, last)
    flashbsr.rope_append_paged_kv_cache(rows, rows, rows, *where, cache, *table, last)
    flashbsr.get_seq_lens(table[1], last, PAGE_SIZE)


def dense_pages(
    kv_dtype: str, q_dtype: str = "bfloat16", dim: int = 128, page_size: int | None = PAGE_SIZE,
    rows: int | None = None,
) -> str:  # fmt: skip
    """So many queries that codes are written as 16 bits first; requests end inside of pages."""
    eight = kv_dtype in ("int8", "float8_e4m3fn")  # which other kernels read faster
    lengths, queries = (1543, 0, 1001), (300, 0, 260)
    if eight:
        lengths, queries = (2543, 0, 1001), (2500, 0, 900)
    types = {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "backend": DEVICE}
    low = rows if DEVICE == "cuda" else None
    task = flashbsr.TaskInfo(2 * GROUP, 2, dim, tile_rows=low, **types)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=not eight), task)
    if page_size:
        pages = offsets(tuple(-(-n // page_size) for n in lengths))
        ids = np.random.default_rng(2).permutation(int(pages[-1])).astype(np.int32)
        attention.plan(
            flashbsr.Paged(offsets(queries), pages, ids, kv_lens=np.array(lengths, np.int32),
                                 page_size=page_size)
        )  # fmt: skip
        shape: tuple[int, ...] = (int(pages[-1]), page_size, 2)
    else:
        attention.plan(flashbsr.Ragged(offsets(queries), offsets(lengths)))
        shape = (sum(lengths), 2)
    bits = np.random.default_rng(2).integers(0, 256, (*shape, dim // (1 + (not eight))), np.uint8)
    codes = integers(bits).view(getattr(torch, kv_dtype)) if eight else integers(bits)
    groups = {"nvfp4": (dim // 16,), "int4": (2,)}.get(kv_dtype, ())
    scales = normal((*shape, *groups), "float32").abs()
    scales = scales.to(torch.float8_e4m3fn) if kv_dtype == "nvfp4" else scales
    q = normal((sum(queries), 2 * GROUP, dim), q_dtype)
    attention.run(q, (codes, codes), k_scale=scales, v_scale=scales)
    return str(attention._engine.kernel_name())


def write_pages() -> None:
    """NVFP4 as its values, and keys that stay codes."""
    if "scaled" in dense_pages("nvfp4"):
        raise RuntimeError("codes were read as they are")
    for kv_dtype in ("int4", "int8", "float8_e4m3fn"):
        dense_pages(kv_dtype)


def pack() -> None:
    """Bits, whole and in segments that do not end at bytes."""
    bits = (torch.arange(1003) % 3 == 0).to(DEVICE)
    flashbsr.packbits(bits, "little")
    starts = torch.tensor([0, 5, 5, 700, 1003], dtype=torch.int32).to(DEVICE)
    flashbsr.segment_packbits(bits, starts, "big")


def check_pages() -> None:
    """Run attention with the debug switch: pages are validated on the device first."""
    kernel = {"name": "check_pages", "family": "prefill", "rows": 64, "kv": "f16"}
    attend({**kernel, "head_dim": 64, "head_dim_vo": 64}, {}, PAGE_SIZE)


def bounds() -> None:
    """Give a plan of bounds lengths, with fewer queries than planned."""
    task = flashbsr.TaskInfo(2 * GROUP, 2, 64, q_dtype="float16", kv_dtype="float16")
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    attention.plan(flashbsr.Bounds(offsets((4, 4, 4)), np.full(3, 500), page_size=PAGE_SIZE))
    width = -(-500 // PAGE_SIZE)
    lens, queries = integers([77, 0, 500]), integers([0, 3, 3, 7])
    table = integers(np.random.default_rng(1).permutation(3 * width).reshape(3, width))
    q, kv = (
        normal(shape, "float16")
        for shape in ((12, 2 * GROUP, 64), (3 * width, 2, PAGE_SIZE, 2, 64))
    )
    out, _ = attention.run(
        q, kv, kv_lens=lens, block_tables=table, qo_indptr=queries, return_lse=True
    )
    if bool(out[7:].cpu().any()):
        raise RuntimeError("rows without a query are not 0")


#: What runs a kernel around attention.
OPS: dict[str, Callable[[], None]] = {
    "append_paged_kv": lambda: append("bfloat16"),
    "append_paged_kv_convert": lambda: append("float8_e4m3fn"),
    "append_paged_kv_quantize": lambda: sanitizer_codes.quantize(normal),
    "check_pages": check_pages,
    "clear_rows": bounds,
    "dequantize_kv": lambda: sanitizer_codes.quantize(normal),
    "dequantize_pages": write_pages,
    "get_batch_indices_positions": lambda: append("bfloat16"),
    "get_seq_lens": lambda: append("bfloat16"),
    "hadamard": lambda: sanitizer_rotations.hadamard(normal),
    "merge_peers": lambda: sanitizer_merges.through_peers(normal),
    "merge_state": lambda: sanitizer_merges.here(normal),
    "merge_states": lambda: sanitizer_merges.here(normal),
    "packbits": pack,
    "quantize_outputs": lambda: sanitizer_codes.outputs(normal),
    "resolve": bounds,
    "rope": lambda: sanitizer_rotations.rope(normal),
    "rope_append_quantize": lambda: sanitizer_codes.quantize(normal),
    "rope_hadamard": lambda: sanitizer_rotations.rope_hadamard(normal),
    "rope_hadamard_quantize": lambda: sanitizer_rotations.rope_hadamard(normal),
    "segment_indptr": pack,
    "segment_packbits": pack,
}


def page_sizes(family: str, head_dim: int) -> tuple[int | None, ...]:
    """Of the problems of a family; None is ragged."""
    if family == "mixed_gather" or (family == "decode_pairs_gather" and head_dim == 128):
        return (GATHERED,)
    gathers = family in HOPPER and family != "mixed"
    return (None, PAGE_SIZE, *[GATHERED] * gathers)


def run_kernel(kernel: dict[str, Any]) -> list[str]:
    """Run the problems of a row; the names of what ran instead, if anything did."""
    if kernel["rows"] is None:
        if kernel["family"] not in OPS:
            return ["nothing here knows it"]
        OPS[kernel["family"]]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return []
    if kernel["family"] in PASSED and kernel["kv"] in ("f16", "bf16"):
        codes = "int4" if kernel["family"] == "hopper_halves" else "int8"
        what = codes, TYPES[kernel["kv"]], kernel["head_dim"]
        sizes = page_sizes(kernel["family"], 128)
        ran = {dense_pages(*what, size, kernel["rows"]) for size in sizes}
        return sorted(ran - {kernel["name"]})
    others = []
    for spec in SPECS[kernel["variant"]]:
        for page_size in page_sizes(kernel["family"], kernel["head_dim"]):
            rope = spec.get("pos_encoding_mode") == "ROPE_LLAMA"
            if rope and not rotates(kernel, page_size):
                continue
            # Sharing takes the usual height.
            low = kernel["family"] == "hopper_scaled" and kernel["rows"] == 128
            if spec.get("levels") and (page_size is None or low):
                continue
            # A window leaves so few keys that the price of either is that of an item.
            if by_price(kernel) and not spec.get("causal"):
                continue
            ran = attend(kernel, spec, page_size)
            # Compiled at run time, Hopper's are two: for boxes, and for rows that are gathered.
            if ran.removesuffix("_gather") != kernel["name"]:
                others.append(ran)
    return others


def report(kernel: dict[str, Any]) -> bool:
    """Run the problems of a row and say so; whether they led to it, and ended."""
    try:
        others = ", ".join(sorted(set(run_kernel(kernel))))
        problem = f"{others} ran instead" if others else ""
    except Exception as error:  # the others are to run all the same
        problem = f"{type(error).__name__}: {error}".replace("\n", " ")
    print(f"not run: {kernel['name']}: {problem}" if problem else f"ran {kernel['name']}")
    return not problem


def part(text: str) -> tuple[int, int]:
    """``1/3`` -> (1, 3)."""
    first, _, count = text.partition("/")
    if not 0 <= int(first) < int(count):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected I/N with 0 <= I < N")
    return int(first), int(count)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="names, as a shell does")
    parser.add_argument(
        "--part", type=part, default=(0, 1), metavar="I/N", help="every N-th, from I"
    )
    parser.add_argument("--list", action="store_true", help="name the kernels and stop")
    args = parser.parse_args()
    info = engine_info()
    cuda = info["cuda"]
    if not cuda["available"]:
        print(f"sanitizer_cases: no CUDA here: {cuda['problem']}")
        return 2
    major, minor = torch.cuda.get_device_capability()
    kernels = reachable(cuda["kernels"], 10 * major + minor)
    if (major, minor) == (9, 0) and info["jit"]["nvrtc"]:
        kernels += compiled()
    status = 0
    first, step = args.part
    for kernel in kernels[first::step]:
        if not fnmatch.fnmatch(kernel["name"], args.kernels):
            continue
        if args.list:
            print(kernel["name"])
            continue
        if not report(kernel):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
