# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What doors got wrong until somebody attacked them: gradients, masks, shapes, lengths."""

from __future__ import annotations

import copy
from typing import Any

import flashbsr
import numpy as np
import pytest
from harness import framework

torch = framework("torch")

from flashbsr.integrations.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_with_kvcache,
)
from flashbsr.integrations.flash_mla import (  # noqa: E402
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from flashbsr.integrations.flex_attention import flex_attention  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402


@pytest.mark.parametrize("name", ["attention", "flash_attn_func", "flex_attention"])
def test_a_gradient_of_queries_that_are_copied_is_refused(name: str) -> None:
    q, k = torch.randn(2, 4, 5, 64, requires_grad=True), torch.randn(2, 4, 5, 64)
    if name == "flex_attention":
        out = flex_attention(q, k, k)
    else:
        call = flash_attn_func if name == "flash_attn_func" else flashbsr.attention
        out = call(*(x.transpose(1, 2) for x in (q, k, k)))
    with pytest.raises(flashbsr.UnsupportedError, match="gradient|requires_grad"):
        (out.sum() + q.sum()).backward()


def test_attention_of_float8_has_the_type_that_programs_are_told() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 64).to(torch.float8_e4m3fn)
        assert flashbsr.attention(q, q, q).dtype == torch.bfloat16


def tiny(name: str, **options: Any) -> Any:
    transformers = framework("transformers")
    from flashbsr.integrations.transformers import register

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_attn_implementation(register())
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_gradient_of_keys_alone_is_refused(training: bool, padded: bool) -> None:
    model = tiny("Llama").train(training)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name or "mlp" in name)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, : 3 * padded] = 0
    with pytest.raises(flashbsr.UnsupportedError, match="gradient|requires_grad"):
        model(torch.arange(18).view(2, 9), attention_mask=mask).logits.sum().backward()


def test_a_gradient_of_sinks_alone_is_refused() -> None:
    model = tiny("GptOss", head_dim=16, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("sinks" in name or "lm_head" in name)
    with pytest.raises(flashbsr.UnsupportedError, match="gradient|requires_grad"):
        model(torch.arange(9)[None]).logits.sum().backward()


def test_autocast_is_that_of_sdpa() -> None:
    model = tiny("Llama")
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    ids = torch.arange(9)[None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = model(ids).logits, other(ids).logits
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


DOCUMENTS = torch.arange(130) // 40
TAGS = torch.randint(0, 2, (130, 3), generator=torch.Generator().manual_seed(0)).bool()
MASKS = {
    "documents": lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv),
    "tags": lambda b, h, q, kv: (TAGS[q] & TAGS[kv]).any() | (q == kv),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [128, 130])
def test_masks_that_look_pairs_up(name: str, length: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
    mask = theirs.create_block_mask(MASKS[name], None, None, length, length, device="cpu")
    kept = theirs.create_mask(MASKS[name], None, None, length, length, device="cpu")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), wanted)


def test_flex_attention_of_shapes_that_do_not_fit() -> None:
    mask = theirs.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cpu")
    q = torch.randn(2, 2, 128, 64)
    for name, k, v in (("value", q, q[:, :, :32]), ("value", q, q[:1]), ("key", q[:1], q)):
        with pytest.raises(flashbsr.ShapeError, match=name):
            flex_attention(q, k, v, block_mask=mask)
    scale = torch.tensor(0.1)
    flex_attention(q, q, q, block_mask=mask, scale=scale)
    scale.fill_(0.5)
    found = flex_attention(q, q, q, block_mask=mask, scale=scale)
    torch.testing.assert_close(found, flex_attention(q, q, q, block_mask=mask, scale=0.5))


def test_chosen_tokens_of_another_batch() -> None:
    rng = np.random.default_rng(0)
    q, cache = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 1, 4, 576), (2, 64, 1, 576))
    )
    indices = rng.integers(0, 128, (4, 1, 4)).astype(np.int32)
    metadata, _ = get_mla_metadata(topk=8)
    for cached, chosen, name in (
        (cache, indices, "indices"),
        (np.concatenate([cache, cache], 2), indices[:2], "k_cache"),
    ):
        with pytest.raises(flashbsr.ShapeError, match=name):
            flash_mla_with_kvcache(q, cached, None, None, 512, metadata, indices=chosen)


@pytest.mark.parametrize(("lens", "count", "name"), [
    ((8, 0), 2, "cache_seqlens"), ((7, 0), 2, "cache_seqlens"), ((-3, 4), 2, "cache_seqlens"),
    ((1, 2, 3), 2, "cache_seqlens"), ((1, 2), 1, "k"),
])  # fmt: skip
def test_new_tokens_that_have_no_room(lens: tuple[int, ...], count: int, name: str) -> None:
    cache, new = torch.zeros(2, 2, 8, 2, 64), torch.ones(2, 2, 2, 64)
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        flash_attn_with_kvcache(
            new, cache[0], cache[1], new[:count], new[:count],
            cache_seqlens=torch.tensor(lens, dtype=torch.int32), causal=True,
        )  # fmt: skip
    assert caught.value.argument == name
    assert not cache.any()


def test_rows_of_a_cache_in_pages() -> None:
    cache, q = torch.zeros(2, 8, 2, 64), torch.ones(2, 1, 2, 64)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(flashbsr.UnsupportedError, match="cache_batch_idx"):
        flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=np.int32(3), cache_batch_idx=rows,
            block_table=rows[:, None],
        )  # fmt: skip
