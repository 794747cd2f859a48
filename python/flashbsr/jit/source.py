# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""C++ around a user's variant.

The text stands in ``namespace flashbsr::user``, where ``VariantBase`` is a struct made for it: the
library's, with the extras as members, a constructor from ``Params``, and the switches of the hooks
that the text has.
"""

from __future__ import annotations

from ..variant import Variant

__all__ = ["cpu_source", "struct_name", "variant_source"]

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
_LOGIT_SWITCHES = {"logits_transform": "transforms_logits", "logits_mask": "masks_logits"}


def struct_name(variant: Variant) -> str:
    """Qualified name of the user's struct; kernels take it as ``flashbsr::Custom<...>``."""
    return f"flashbsr::user::{variant.name}"


def variant_source(variant: Variant) -> str:
    """Write the variant for any compiler: CUDA's and the host's take the same text."""
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


def cpu_source(variant: Variant, isa: str) -> str:
    """Write the translation unit of a variant for one SIMD level of the CPU engine."""
    product = "Bf16Op" if isa.endswith("_bf16") else "F32Op"
    return f"""#define FLASHBSR_CPU_ISA {isa}
#include <flashbsr/cpu/attend.h>
{variant_source(variant)}
extern "C" __attribute__((visibility("default")))
const flashbsr::cpu::KernelTable* flashbsr_cpu_kernels() {{
  namespace cpu = flashbsr::cpu;
  return &cpu::variant_table<cpu::{product}, flashbsr::Custom<{struct_name(variant)}>>();
}}
"""
