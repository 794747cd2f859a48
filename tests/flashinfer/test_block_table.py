# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The functions that take dense block tables, against the reference."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from base2 import compare
from cases import Case, Problem, build
from flashbsr.engine import kept
from harness import CPU, Device
from reference import Variant

F16 = 3 * ("float16",)
SCALE = 0.11
DECODE = Case(
    "table", 5 * (1,), (1, 300, 17, 0, 64), (8, 2), dtypes=F16, layout="table", kv_layout="HND",
    variant=Variant(sm_scale=SCALE),
)  # fmt: skip
VERIFY = dataclasses.replace(
    DECODE,
    q_lens=5 * (3,),
    kv_lens=(3, 300, 17, 4, 64),
    variant=Variant(causal=True, sm_scale=SCALE),
)
CONTEXT = dataclasses.replace(
    DECODE, q_lens=(30, 1, 0, 7, 64), kv_lens=(30, 300, 17, 100, 64),
    variant=Variant(causal=True, sm_scale=SCALE),
)  # fmt: skip


def cum(lens: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(dtype)


def decode(device: Device, p: Problem, lens: Any = None, **options: Any) -> Any:
    """A call with all arrays on the device."""
    sent = device.upload(p, indices=True)
    options = {"bmm1_scale": SCALE, "kv_layout": p.case.kv_layout} | options
    return flashbsr.flashinfer.trtllm_batch_decode_with_kv_cache(
        sent.q, sent.kv, None, sent.block_tables, sent.kv_lens if lens is None else lens,
        max(p.case.kv_lens), **options,
    )  # fmt: skip


def check(device: Device, p: Problem, found: Any) -> None:
    compare(p, device.get(found[0]), device.get(found[1]))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_decode(kv_layout: str, stacked: bool, device: Device) -> None:
    p = device.build(dataclasses.replace(DECODE, kv_layout=kv_layout, stacked=stacked))
    check(device, p, decode(device, p, return_lse=True))


@pytest.mark.parametrize("as_list", [True, False])
def test_sinks_and_windows(as_list: bool, device: Device) -> None:
    variant = Variant(causal=True, sm_scale=SCALE, window_left=30)
    p = device.build(dataclasses.replace(VERIFY, variant=variant, sinks=True))
    sinks = device.put(p.run_options["sinks"])
    check(
        device, p,
        decode(
            device, p, q_len_per_req=3, window_left=30, sinks=[sinks] if as_list else sinks,
            return_lse=True,
        ),
    )  # fmt: skip


def test_verify(device: Device) -> None:
    """Tokens of a request see each other causally, by a number or by offsets."""
    p = device.build(VERIFY)
    check(device, p, decode(device, p, q_len_per_req=3, max_q_len=3, return_lse=True))
    q_lens = device.put(cum(p.case.q_lens))
    check(device, p, decode(device, p, cum_seq_lens_q=q_lens, max_q_len=5, return_lse=True))
    ragged = device.build(CONTEXT)
    q_lens = device.put(cum(ragged.case.q_lens))
    check(device, ragged, decode(device, ragged, cum_seq_lens_q=q_lens, return_lse=True))


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
def test_lengths_of_any_integer(kind: Any) -> None:
    p = build(DECODE)
    check(CPU, p, decode(CPU, p, lens=p.kv_lens.astype(kind), return_lse=True))


def test_output_and_scales(device: Device) -> None:
    """Scales of the output and per head, and arrays of the caller's."""
    p = device.build(dataclasses.replace(DECODE, dtypes=("float16", "float16", "float32")))
    sent = device.upload(p)
    out, lse = map(device.put, p.new_outputs())
    heads = np.linspace(0.05, 0.2, 8).astype(np.float32)
    found = decode(
        device, p, out=out, lse=lse, return_lse=True, bmm1_scale=device.put(heads), bmm2_scale=0.25
    )  # fmt: skip
    assert found[0] is out
    assert found[1] is lse
    p = dataclasses.replace(p, run_options={"q_scale": heads / SCALE, "v_scale": 0.25})
    check(device, p, found)
    again = decode(device, p, bmm1_scale=device.put(heads), bmm2_scale=0.25, out_dtype="float32")
    np.testing.assert_array_equal(device.get(again), device.get(out))
    del sent


def test_xqa(device: Device) -> None:
    p = device.build(dataclasses.replace(DECODE, kv_layout="NHD"))
    sent = device.upload(p, indices=True)
    out = flashbsr.flashinfer.xqa_batch_decode_with_kv_cache(
        sent.q, sent.kv, None, sent.block_tables, sent.kv_lens, 300, SCALE
    )
    compare(p, device.get(out))


@pytest.mark.parametrize("causal", [True, False])
def test_context(causal: bool, device: Device) -> None:
    p = device.build(dataclasses.replace(CONTEXT, variant=Variant(causal=causal, sm_scale=SCALE)))
    sent = device.upload(p, indices=True)
    found = flashbsr.flashinfer.trtllm_batch_context_with_kv_cache(
        sent.q, sent.kv, None, sent.block_tables, sent.kv_lens, 64, 300, SCALE, 1.0, 5,
        sent.qo_indptr, None, return_lse=True, causal=causal,
    )  # fmt: skip
    check(device, p, found)


def test_cudnn_decode(device: Device) -> None:
    p = device.build(dataclasses.replace(DECODE, stacked=False))
    sent = device.upload(p, indices=True)
    lens = device.put(p.kv_lens.reshape(-1, 1, 1, 1))
    out = flashbsr.flashinfer.cudnn_batch_decode_with_kv_cache(
        sent.q, *sent.kv, SCALE, None, max_sequence_kv=300, actual_seq_lens_kv=lens,
        block_tables=sent.block_tables, batch_offsets_q=np.arange(6) * 8 * 64,
    )  # fmt: skip
    compare(p, device.get(out))


@pytest.mark.parametrize("paged", [True, False])
def test_cudnn_prefill(paged: bool, device: Device) -> None:
    case = CONTEXT if paged else dataclasses.replace(CONTEXT, layout="ragged", kv_layout="NHD")
    p = device.build(dataclasses.replace(case, stacked=False))
    sent = device.upload(p, indices=True)
    rows = cum(case.q_lens)
    found = flashbsr.flashinfer.cudnn_batch_prefill_with_kv_cache(
        sent.q, *sent.kv, SCALE, None, max_token_per_sequence=64, max_sequence_kv=300,
        actual_seq_lens_q=device.put(np.array(case.q_lens).reshape(-1, 1, 1, 1)),
        actual_seq_lens_kv=sent.kv_lens, block_tables=sent.block_tables if paged else None,
        causal=True, return_lse=True, batch_offsets_q=rows * 8 * 64, batch_offsets_stats=rows * 8,
        batch_offsets_o=rows * 8 * 64,
        batch_offsets_k=None if paged else cum(case.kv_lens) * 2 * 64,
    )  # fmt: skip
    check(device, p, found)


def test_no_lse_is_none() -> None:
    p = build(dataclasses.replace(CONTEXT, layout="ragged", kv_layout="NHD", stacked=False))
    out, lse = flashbsr.flashinfer.cudnn_batch_prefill_with_kv_cache(
        p.q, *p.kv, SCALE, None, max_token_per_sequence=64, max_sequence_kv=300,
        actual_seq_lens_q=np.array(p.case.q_lens), actual_seq_lens_kv=p.kv_lens, causal=True,
        return_lse=False, batch_offsets_units="tokens", batch_offsets_q=cum(p.case.q_lens),
    )  # fmt: skip
    assert lse is None
    compare(p, out)


def test_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's later layers do not plan; another length, another page, a failed plan do."""
    plans = []
    whole = flashbsr.Attention.plan

    def counted(self: Any, *args: Any, **options: Any) -> None:
        plans.append(None)
        whole(self, *args, **options)

    monkeypatch.setattr(flashbsr.Attention, "plan", counted)
    monkeypatch.setattr(kept, "_engines", type(kept._engines)())
    p = build(DECODE)
    for _ in range(3):
        check(CPU, p, decode(CPU, p, return_lse=True))
    assert len(plans) == 1
    # The caller's arrays are read anew: written in place they are other arrays.
    own = p.block_tables[1].copy()
    p.block_tables[1, :3] = own[[1, 0, 2]]
    k, v = p.requests[1][1:3]
    swap = np.r_[16:32, 0:16, 32:300]
    requests = [*p.requests]
    requests[1] = (p.requests[1][0], k[swap], v[swap], None)
    check(CPU, dataclasses.replace(p, requests=requests), decode(CPU, p, return_lse=True))
    assert len(plans) == 2
    p.block_tables[1, :3] = own[:3]
    lens = p.kv_lens.copy()
    lens[0] = 10**6
    with pytest.raises(flashbsr.FlashbsrError):
        flashbsr.flashinfer.trtllm_batch_decode_with_kv_cache(
            p.q, p.kv, None, p.block_tables, lens, 10**6, SCALE
        )
    check(CPU, p, decode(CPU, p, return_lse=True))
    assert len(plans) == 4


def test_engines_are_of_the_thread() -> None:
    """Two threads with other batches do not see each other's plans."""
    problems = [build(dataclasses.replace(DECODE, seed=seed)) for seed in range(2)]
    failed = []

    def work(p: Problem) -> None:
        try:
            for _ in range(20):
                check(CPU, p, decode(CPU, p, return_lse=True))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_workspaces() -> None:
    """An array is used: one too small is refused by its name."""
    p = build(dataclasses.replace(DECODE, q_lens=(1,), kv_lens=(5000,)))
    arguments = p.q, p.kv
    rest = p.block_tables, p.kv_lens, 5000, SCALE
    for workspace in (None, 1 << 20, np.zeros(1 << 20, np.uint8)):
        found = flashbsr.flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, workspace, *rest)
        compare(p, found)
    with pytest.raises(flashbsr.CapacityError) as caught:
        flashbsr.flashinfer.trtllm_batch_decode_with_kv_cache(
            *arguments, np.zeros(64, np.uint8), *rest
        )
    assert caught.value.argument == "workspace_buffer"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lens": np.array([1, 300, 17, 0])}, "seq_lens"),
        ({"lens": np.ones(5)}, "seq_lens"),
        ({"lens": np.array([1, 301, 17, 0, 64])}, "max_seq_len"),
        ({"kv_layout": "NDH"}, "kv_layout"),
        ({"kv_layout": "NHD"}, "num_qo_heads"),
        ({"mask": np.ones(3)}, "mask"),
        ({"out_dtype": "nvfp4"}, "out_dtype"),
        ({"q_len_per_req": 0}, "q_len_per_req"),
        ({"q_len_per_req": 2}, "query|q_len_per_req|q"),
        ({"q_len_per_req": 2, "cum_seq_lens_q": cum([1, 1, 3, 1, 1])}, "q_len_per_req"),
        ({"cum_seq_lens_q": cum([1] * 4)}, "cum_seq_lens_q"),
        ({"max_q_len": 0}, "max_q_len"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx"),
        ({"kv_cache_sf": np.ones(3)}, "kv_cache_sf"),
        ({"backend": "trtllm-gen"}, "backend"),
        ({"sinks": [np.ones(8), np.ones(8)]}, "sinks"),
        ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention"),
        ({"bmm1_scale": np.ones(3, np.float32)}, "bmm1_scale"),
        ({"bmm2_scale": np.ones(3, np.float32)}, "bmm2_scale"),
        ({"lse_base": "10"}, "lse_base"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_calls(options: dict[str, Any], name: str) -> None:
    p = build(dataclasses.replace(DECODE, heads=(8, 4)))
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        decode(CPU, p, **options)
    assert caught.value.argument in name.split("|"), caught.value


def test_bad_tables_of_cudnn() -> None:
    p = build(dataclasses.replace(DECODE, stacked=False))
    good: dict[str, Any] = {
        "max_sequence_kv": 300, "actual_seq_lens_kv": p.kv_lens, "block_tables": p.block_tables
    }  # fmt: skip
    for change, name in (
        ({"block_tables": None}, "block_tables"),
        ({"actual_seq_lens_kv": None}, "actual_seq_lens_kv"),
        ({"max_sequence_kv": 299}, "max_sequence_kv"),
        ({"is_cuda_graph_compatible": True}, "is_cuda_graph_compatible"),
        ({"batch_offsets_q": np.arange(6)}, "batch_offsets_q"),
        ({"batch_offsets_k": np.arange(6)}, "batch_offsets_k"),
    ):
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            flashbsr.flashinfer.cudnn_batch_decode_with_kv_cache(
                p.q, *p.kv, SCALE, None, **{**good, **change}
            )
        assert caught.value.argument == name
    exact = reference.attend(p.requests[1][0], *p.requests[1][1:3], Variant(sm_scale=SCALE)).out
    found = flashbsr.flashinfer.cudnn_batch_decode_with_kv_cache(p.q, *p.kv, SCALE, None, **good)
    np.testing.assert_allclose(found[1], exact[0], atol=2e-3)
