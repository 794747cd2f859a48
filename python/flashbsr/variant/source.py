# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""C++ around a user's variant.

The text stands in ``namespace flashbsr::user``, where ``VariantBase`` is a struct made for it: the
library's, with the extras as members, a constructor from ``Params``, and the switches of the hooks
that the text has.
"""

from __future__ import annotations

import re

from .variant import Variant

__all__ = ["cpu_source", "signature_checks", "struct_name", "variant_source"]

_TYPES = {
    "float32": "float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
_ROW_SWITCHES = {
    "query_transform": "transforms_queries",
    "key_transform": "transforms_keys",
    "value_transform": "transforms_values",
    "output_transform": "transforms_outputs",
}
# How a hook is to be written, and an expression of which each must have the type.
_ROW = "template <class Row> void {}(Row x, const RowAt& at) const"
_LOGITS = {
    "logits_transform": ("Float", "typename M::Float x, const LogitsAt<M>& at", "x, at"),
    "logits_mask": ("Bool", "const LogitsAt<M>& at", "at"),
    "activation": ("Float", "typename M::Float x", "x"),
}
_LOGIT_SWITCHES = {"logits_transform": "transforms_logits", "logits_mask": "masks_logits"}


def struct_name(variant: Variant) -> str:
    """Qualified name of the user's struct; kernels take it as ``flashbsr::Custom<...>``."""
    return f"flashbsr::user::{variant.name}"


def variant_source(variant: Variant, takes_rope: bool = True) -> str:
    """Write the variant for any compiler: CUDA's and the host's take the same text.

    Parameters
    ----------
    variant : Variant
    takes_rope : bool
        False: a kernel for runs without RoPE, compiled in half to two thirds of the time.

    Returns
    -------
    str
    """
    members, values = [], []
    numbers = tensors = 0
    for extra in variant.extras:
        kind = _TYPES[extra.dtype]
        if extra.rank:
            members.append(f"  ExtraTensor<{kind}, {extra.rank}> {extra.name};")
            values.append(f"{extra.name}(p.extras.tensor[{tensors}])")
            tensors += 1
        else:
            members.append(f"  {kind} {extra.name};")
            values.append(f"{extra.name}(p.extras.number<{kind}>({numbers}))")
            numbers += 1
    switches = [
        f"  static constexpr bool {switch} = true;"
        for hook, switch in _ROW_SWITCHES.items()
        if hook in variant.hooks
    ] + [
        f"  FLASHBSR_FN bool {switch}() const {{ return true; }}"
        for hook, switch in _LOGIT_SWITCHES.items()
        if hook in variant.hooks
    ]
    if not takes_rope:
        switches.insert(0, "  static constexpr bool takes_rope = false;")
    if not values:  # structs with a constructor of their own may leave this one's out
        switches.insert(0, "  VariantBase() = default;")
    constructor = "  FLASHBSR_FN VariantBase(const Params&{}) {}{{}}".format(
        " p" if values else "", f"\n      : {', '.join(values)} " if values else ""
    )
    softmax = "true" if variant.use_softmax else "false"
    lines = [
        "#include <flashbsr/variant/custom.h>",
        "namespace flashbsr::user {",
        "struct VariantBase : ::flashbsr::VariantBase {",
        *members,
        *switches,
        constructor,
        "};",
        "// What the text calls flashbsr::VariantBase is the struct above.",
        "namespace flashbsr {",
        "using namespace ::flashbsr;",
        "using user::VariantBase;",
        "}  // namespace flashbsr",
        f'#line 1 "{variant.name}"',
        variant.text.rstrip("\n"),
        f'#line 1 "after {variant.name}"',
        f"static_assert({variant.name}::use_softmax == {softmax},",
        '              "write it as: static constexpr bool use_softmax = false;");',
        "}  // namespace flashbsr::user",
    ]
    return "\n".join(lines) + "\n"


def signature_checks(variant: Variant, math: str) -> str:
    """Write assertions that say, at a hook's own line, how it is to be written.

    Parameters
    ----------
    variant : Variant
    math : str
        Qualified name of the math policy, which is to be declared before.
    """
    code = re.sub(r"//[^\n]*|/\*.*?\*/", _blank, variant.text, flags=re.DOTALL)
    lines = ["namespace flashbsr::user::checks {", "using ::flashbsr::LogitsAt, ::flashbsr::RowAt;"]
    asserts = []
    for hook in sorted(variant.hooks):
        if hook in _LOGITS:
            kind, parameters, arguments = _LOGITS[hook]
            wanted = f"template <class M> typename M::{kind} {hook}({parameters}) const"
            call = f"v.template {hook}<M>({arguments})"
            body = f"requires ::flashbsr::detail::kSame<decltype({call}), typename M::{kind}>;"
        else:
            wanted, body = _ROW.format(hook), f"v.{hook}(row, RowAt{{}});"
        lines += [
            "template <class V, class M>",
            f"concept {hook}_fits = requires(const V v, typename M::Float x, float* row,",
            f"                              const LogitsAt<M> at) {{ {body} }};",
        ]
        found = re.search(rf"\b{hook}\s*\(", code)
        assert found is not None
        asserts += [
            f'#line {code.count(chr(10), 0, found.start()) + 1} "{variant.name}"',
            f"static_assert({hook}_fits<{struct_name(variant)}, {math}>,",
            f'              "expected {wanted}");',
        ]
    return "\n".join([*lines, *asserts, f'#line 1 "checks of {variant.name}"', "}"]) + "\n"


def _blank(comment: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", comment[0])


def cpu_source(variant: Variant, isa: str) -> str:
    """Write the translation unit of a variant for one SIMD level of the CPU engine."""
    product = "Bf16Op" if isa.endswith("_bf16") else "F32Op"
    return f"""#define FLASHBSR_CPU_ISA {isa}
#include <flashbsr/cpu/attend.h>
{variant_source(variant)}
{signature_checks(variant, "::flashbsr::cpu::VectorMath")}
extern "C" __attribute__((visibility("default")))
const flashbsr::cpu::KernelTable* flashbsr_cpu_kernels() {{
  namespace cpu = flashbsr::cpu;
  using Variant = flashbsr::Custom<{struct_name(variant)}, true>;
  return &cpu::variant_table<cpu::{product}, Variant, false>();
}}
"""
