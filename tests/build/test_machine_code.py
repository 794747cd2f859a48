# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/check_machine_code.py on listings of two products; no CUDA tool is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toolchain import ROOT, load_tool, run_tool

sys.path.insert(0, str(ROOT / "tools"))  # for what the tool imports
CODE = load_tool("check_machine_code")

NAME = "hopper_sm90a_d64_bf16_r128_plain"
LISTING = """
Fatbin elf code:
================
arch = sm_90a
compressed

\t\tFunction : {name}
\t.headerflags\t@"EF_CUDA_ACCELERATORS EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/                   R2UR UR4, R5 ;                        /* 0x00000000050472ca */
        /*0020*/              @P1  UTMALDG.4D [UR16], [UR30] ;           /* 0x000000101e0073b4 */
        /*0030*/                   WARPGROUP.ARRIVE ;                    /* 0x00000000000079c5 */
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;
{between}        /*1f060*/                  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*1f070*/                  R2UR UR12, R9 ;
        /*1f080*/              @!PT HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR12].tnspB, R56, gsb0 ;
{after}        /*1f090*/             @!P0 BRA 0x40 ;
"""
MOVE = "        /*0058*/                   R2UR UR8, R7 ;\n"
PRODUCT = "        /*0059*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;\n"
SPILL = "        /*1f088*/             @!UP0 STL.64 [R1+0x8], R2 ;\n"
NOTE = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    f"serialized due to non wgmma instructions in the function '{NAME}'\n"
)


def listing(name: str = NAME, between: str = "", after: str = "") -> str:
    return LISTING.format(name=name, between=between, after=after)


def problems(text: str, log: str = "") -> list[str]:
    (code,) = CODE.parse(text)
    return CODE.check(code, log)


def test_products_and_counts() -> None:
    (code,) = CODE.parse(listing(between=MOVE))
    assert code.kernel == NAME
    assert [(p.kind, p.length, p.moves) for p in code.products] == [
        ("HGMMA", 2, 1),
        ("HGMMA", 1, 0),
    ]
    assert code.counts["UTMALDG"] == 1
    assert code.counts["R2UR"] == 3, "those around the products are counted, not held against it"
    assert code.row().split() == [NAME, "11", "1", "0", "2/1", "1"]
    assert len(CODE.parse(listing() + listing("other"))) == 2


@pytest.mark.parametrize(
    ("text", "log", "found"),
    [
        (listing(), "", []),
        (listing(between=MOVE), "", ["1 R2UR inside of products"]),
        (listing(NAME.replace("plain", "standard"), between=MOVE), "", []),
        (listing(between=MOVE + 8 * PRODUCT), "", []),
        (listing(after=SPILL), "", ["1 STL"]),
        (listing(after=SPILL.replace("STL.64 [R1+0x8], R2", "LDL R2, [R1]")), "", ["1 LDL"]),
        (listing().replace("UTMALDG", "LDGSTS"), "", ["no UTMALDG"]),
        (listing().replace("HGMMA", "HMMA"), "", ["no HGMMA"]),
        (listing(NAME.replace("bf16", "e4m3")), "", ["no QGMMA"]),
        (listing(NAME.replace("bf16", "e4m3")).replace("HGMMA", "QGMMA"), "", []),
        (listing(), NOTE, ["products wait for each other (C7510) Potential Performance Loss"]),
        (listing(), NOTE.replace("C7510", "C7520"), ["products wait for each other (C7520)"]),
        (listing(), NOTE.replace("C7510", "C7521"), []),
    ],
)
def test_what_is_wrong(text: str, log: str, found: list[str]) -> None:
    said = problems(text, log)
    assert len(said) == len(found)
    assert all(part in line for part, line in zip(found, said, strict=True))


def test_a_product_ends() -> None:
    with pytest.raises(CODE.CodeError, match="without an end"):
        CODE.parse(listing().replace(", gsb0", ""))


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build of one Hopper kernel and another one, and a disassembler that prints the "fatbin"."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "manifest.txt").write_text(f"nvcc 13.0.88\nrope\n{NAME}\n")
    (folder / f"{NAME}.fatbin").write_text(listing())
    (folder / f"{NAME}.log").write_text("ptxas info    : Used 168 registers\n")
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\nexec cat "$2"\n')
    tool.chmod(0o755)
    return tmp_path


def check(build: Path) -> int:
    return CODE.main([str(build), "--cuobjdump", str(build / "cuobjdump")])


def test_a_build(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(build) == 0
    assert "1 kernels, 0 problems" in capsys.readouterr().out
    (build / f"kernels/{NAME}.log").write_text(NOTE)
    assert check(build) == 1
    assert f"{NAME}: products wait" in capsys.readouterr().out


def test_nothing_to_check_is_no_success(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (build / f"kernels/{NAME}.fatbin").write_text("Fatbin ptx code:\n")
    assert check(build) == 2
    assert "expected one image" in capsys.readouterr().out
    (build / "cuobjdump").write_text("#!/bin/sh\necho no file >&2\nexit 255\n")
    assert check(build) == 2
    assert "cuobjdump failed: no file" in capsys.readouterr().out
    (build / f"kernels/{NAME}.fatbin").unlink()
    assert check(build) == 2
    assert "build the CUDA kernels first" in capsys.readouterr().out
    (build / "kernels/manifest.txt").write_text("nvcc 13.0.88\nrope\n")
    assert check(build) == 2
    assert "FLASHBSR_CUDA_ARCHS" in capsys.readouterr().out
    (build / "kernels/manifest.txt").unlink()
    assert check(build) == 2
    assert "FLASHBSR_CUDA=ON" in capsys.readouterr().out


def test_the_wgmma_header_is_what_its_generator_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_tool("generate_wgmma.py", "--check")
    assert outcome.status == 0, outcome.output
    generator = load_tool("generate_wgmma")
    header = tmp_path / "wgmma_shapes.h"
    header.write_text(generator.text().replace("m64n80", "m64n88", 1))
    monkeypatch.setattr(generator, "HEADER", header)
    monkeypatch.setattr(sys, "argv", ["generate_wgmma.py", "--check"])
    assert generator.main() == 1
    assert "wgmma_shapes.h is not what" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["generate_wgmma.py"])
    assert generator.main() == 0
    assert header.read_text() == generator.text()
