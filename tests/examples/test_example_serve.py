# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The serving example: small runs that are checked against the dense forward, and the program."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from serve import check, weights, workload
from serve.__main__ import main
from serve.display import Display
from serve.engine import Engine, Request, Sequence
from serve.model import Model
from serve.pages import PagePool
from serve.tokenizer import END, Tokenizer

TINY = weights.Config(
    vocab_size=300, hidden=48, layers=2, q_heads=4, kv_heads=2, head_dim=16, ffn=64, context=128
)


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(1 if len(shape) == 1 else 0, 0.3, shape).astype(np.float32)
        for name, shape in TINY.shapes().items()
    }


TENSORS = tiny_tensors()


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return (END, *np.random.default_rng(seed).integers(0, 256, length - 1).tolist())


def engine(pages: int = 64, page_size: int = 4, budget: int = 32) -> Engine:
    return Engine(Model(TINY, TENSORS, pages, page_size), PagePool(pages, page_size), budget)


def finish(serving: Engine, limit: int = 2000) -> None:
    """Steps until idle; the allocator is sound after each step, and empty at the end."""
    for _ in range(limit):
        if not serving.busy:
            break
        step = serving.step()
        assert step.prefill_tokens + step.decode_tokens <= serving.budget
        serving.pool.check()
    assert not serving.busy
    assert serving.pool.available == serving.pool.num_pages


def verify(serving: Engine, sequences: list[Sequence]) -> check.Report:
    report = check.compare(TINY, TENSORS, serving.model, sequences)
    assert report.passed, report.wrong
    assert report.positions + report.reused == sum(len(s.tokens) - 1 for s in sequences)
    return report


# --- the engine ---------------------------------------------------------------------------------


def test_prefix_is_shared_and_computed_once() -> None:
    serving = engine(page_size=4)
    prefix = prompt(22, seed=1)
    first = serving.submit(Request(0, (*prefix, 7, 8), 12))
    serving.step()
    second = serving.submit(Request(1, (*prefix, 9), 6))
    third = serving.submit(Request(2, prefix[:8], 3))  # its last page may not be shared
    serving.step()
    assert second.pages[:5] == first.pages[:5]
    assert third.pages[:1] == first.pages[:1]
    assert third.pages[1] != first.pages[1]
    assert serving.pool.references[first.pages[0]] == 3
    assert (second.shared_tokens, third.shared_tokens) == (20, 4)
    finish(serving)
    assert min(second.states) == 20
    late = serving.submit(Request(3, tuple(first.tokens[:-1]), 2))  # with pages that nobody holds
    finish(serving)
    assert late.shared_tokens == (len(late.request.prompt) - 1) // 4 * 4
    verify(serving, [first, second, third, late])


@pytest.mark.parametrize("length", [23, 24, 25])  # before, at and behind the end of a page
@pytest.mark.parametrize("budget", [6, 32])
def test_samples_of_one_prompt(length: int, budget: int) -> None:
    """The prompt is computed once; its full pages are everyone's, the last one each one's own."""
    serving = engine(pages=200, budget=budget)
    shared = (length - 1) // 4
    tokens = prompt(length, seed=3)
    requests = [
        Request(i, tokens, 20, 0.9, seed=1, sample_of=0 if i else None, ignore_end=True)
        for i in range(5)
    ]
    sequences = [serving.submit(request) for request in requests]
    while serving.waiting:
        serving.step()
    serving.pool.check()
    assert [s.shared_tokens for s in sequences] == [0, *(4 * [4 * shared])]
    assert all(s.pages[:shared] == sequences[0].pages[:shared] for s in sequences if s.pages)
    own = [page for s in sequences for page in s.pages[shared:]]
    assert len(own) == len(set(own))
    finish(serving)
    assert len({tuple(s.generated) for s in sequences}) > 1
    assert all(len(s.generated) == 20 for s in sequences)
    verify(serving, sequences)


def test_samples_without_sharing() -> None:
    """Each has pages of its own, and writes what it would write with shared ones."""
    outputs = []
    for share in (True, False):
        model = Model(TINY, TENSORS, 64, 4, "auto" if share else "off")
        serving = Engine(model, PagePool(64, 4), 32, share=share)
        tokens = prompt(30, seed=4)
        requests = [Request(i, tokens, 8, sample_of=0 if i else None) for i in range(3)]
        sequences = [serving.submit(request) for request in requests]
        finish(serving)
        verify(serving, sequences)
        assert (serving.shared_pages > 0) == share
        outputs.append([s.generated for s in sequences])
    assert outputs[0] == outputs[1]


def test_samples_when_the_first_goes() -> None:
    """Preempted while its prompt is computed, or finished: nobody waits for ever."""
    serving = engine(pages=14, budget=8)
    tokens = prompt(24, seed=5)
    sequences = [
        serving.submit(Request(i, tokens, 20, sample_of=0 if i else None, ignore_end=True))
        for i in range(4)
    ]
    finish(serving)
    verify(serving, sequences)
    late = serving.submit(Request(4, tokens, 3, sample_of=0))
    finish(serving)
    assert late.shared_tokens == 20


def test_preemption_recomputes() -> None:
    requests = [Request(i, prompt(9 + i, seed=i), 24) for i in range(5)]
    outputs = []
    for pages in (64, 12):
        serving = engine(pages=pages)
        sequences = [serving.submit(request) for request in requests]
        finish(serving)
        verify(serving, sequences)
        assert (serving.preemptions > 0) == (pages == 12)
        assert serving.restored_tokens <= serving.lost_tokens
        assert sum(s.preemptions for s in sequences) == serving.preemptions
        assert sequences[0].preemptions == 0  # the oldest is never the victim
        outputs.append([s.generated for s in sequences])
    assert outputs[0] == outputs[1]


def test_request_as_large_as_the_cache() -> None:
    serving = engine(pages=5)
    sequences = [serving.submit(Request(i, prompt(8, seed=i), 12)) for i in range(3)]
    finish(serving)
    verify(serving, sequences)


def test_long_prompts_are_chunked_beside_decodes() -> None:
    serving = engine(budget=6)
    short = serving.submit(Request(0, prompt(3, seed=0), 20))
    serving.step()
    long = serving.submit(Request(1, prompt(40, seed=1), 4))
    steps = []
    while not long.generated:
        steps.append(serving.step())
        serving.pool.check()
    assert [(s.prefill_tokens, s.decode_tokens) for s in steps] == [(5, 1)] * 8
    finish(serving)
    verify(serving, [short, long])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_greedy_output_does_not_depend_on_the_batch(page_size: int) -> None:
    """Alone, all at once, in small steps or one after another: the same tokens."""
    requests = [Request(i, prompt(2 + 5 * i, seed=10 + i), 16) for i in range(6)]

    def run(budget: int, gap: int, chosen: list[Request]) -> list[list[int]]:
        serving = engine(256 // page_size, page_size, budget)
        sequences = []
        for request in chosen:
            sequences.append(serving.submit(request))
            for _ in range(gap):
                serving.step()
        finish(serving)
        # Where two logits are closer than the tolerance, the texts might differ: not here.
        assert verify(serving, sequences).close == 0
        return [s.generated for s in sequences]

    expected = [run(256, 0, [request])[0] for request in requests]
    for budget, gap in ((256, 0), (7, 0), (64, 3)):
        assert run(budget, gap, requests) == expected


def test_runs_repeat_bit_for_bit() -> None:
    def run() -> list[Sequence]:
        serving = engine(pages=14, budget=9)
        requests = [Request(i, prompt(7 + 3 * i, i), 12, 0.9, 0.8, seed=5) for i in range(4)]
        sequences = [serving.submit(request) for request in requests]
        finish(serving)
        return sequences

    for a, b in zip(run(), run(), strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_array_equal(np.stack(a.logits), np.stack(b.logits))


def test_one_plan_per_step() -> None:
    serving = engine()
    attention = serving.model._attention
    calls = {"plan": 0, "run": 0}

    class Counting:
        def plan(self, *args: object, **kwargs: object) -> object:
            calls["plan"] += 1
            return attention.plan(*args, **kwargs)

        def run(self, *args: object, **kwargs: object) -> object:
            calls["run"] += 1
            return attention.run(*args, **kwargs)

    serving.model._attention = Counting()
    serving.submit(Request(0, prompt(9, seed=0), 5))
    finish(serving)
    assert calls == {"plan": serving.steps, "run": serving.steps * TINY.layers}


def test_end_token_finishes() -> None:
    tensors = TENSORS | {"embed": TENSORS["embed"].copy()}
    tensors["embed"][END] *= 40  # by far the largest logit, of either sign
    serving = Engine(Model(TINY, tensors, 32, 4), PagePool(32, 4))
    sequences = [serving.submit(Request(i, prompt(5, seed=i)[1:], 30)) for i in range(8)]
    finish(serving)
    reasons = {s.finish_reason for s in sequences}
    assert "end" in reasons
    for s in sequences:
        assert (s.generated[-1] == END) == (s.finish_reason == "end")


@pytest.mark.parametrize(
    ("tokens", "new", "pages"), [((), 4, 8), ((1,), 0, 8), ((1,) * 100, 29, 64), ((1,) * 30, 3, 8)]
)
def test_submit_refuses(tokens: tuple[int, ...], new: int, pages: int) -> None:
    with pytest.raises(ValueError, match="request 0: got"):
        engine(pages=pages).submit(Request(0, tokens, new))
    with pytest.raises(ValueError, match="budget: got 0"):
        engine(budget=0)


# --- the check ----------------------------------------------------------------------------------


def test_check_fails_on_a_wrong_cache() -> None:
    serving = engine()
    sequence = serving.submit(Request(0, prompt(9, seed=0), 8))
    serving.step()
    cache = serving.model._layers[1].cache
    cache[sequence.pages[1], 1, 0, 0, 3] += 0.01
    finish(serving)
    report = check.compare(TINY, TENSORS, serving.model, [sequence])
    assert not report.passed
    assert report.max_error > report.tolerance


def test_check_fails_on_nan_and_on_a_wrong_token() -> None:
    serving = engine()
    sequence = serving.submit(Request(0, prompt(9, seed=0), 8))
    finish(serving)
    sequence.tokens[-1] = (sequence.tokens[-1] + 1) % 256
    report = check.compare(TINY, TENSORS, serving.model, [sequence])
    assert [text for text in report.wrong if "greedy token 7" in text] == report.wrong != []
    sequence.logits[2] = sequence.logits[2] * np.nan
    report = check.compare(TINY, TENSORS, serving.model, [sequence])
    assert any("logits differ by nan" in text for text in report.wrong)


# --- the program ----------------------------------------------------------------------------------


def test_poisson_arrivals_are_seeded() -> None:
    tokenizer = Tokenizer.load(weights.TOKENIZER)
    a, b = (workload.poisson(40, 10.0, 30, 3, tokenizer) for _ in range(2))
    assert a == b != workload.poisson(40, 10.0, 30, 4, tokenizer)
    assert 2 < a[-1].arrival < 8
    assert all(10 <= r.max_new_tokens <= 30 for r in a)
    assert workload.poisson(3, float("inf"), 30, 3, tokenizer)[-1].arrival == 0


def test_program(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "6", "--rate", "500", "--max-new-tokens", "24", "--pages", "24"]
    assert main([*arguments, "--budget", "48"]) == 0
    out = capsys.readouterr().out
    for text in (
        "request 5:",
        "pages shared",
        "time to first token",
        "check                 passed",
    ):
        assert text in out
    assert main(["--prompt", "The file is", "--max-new-tokens", "5", "--no-check"]) == 0
    out = capsys.readouterr().out
    assert "\nThe file is" in out
    assert "check" not in out
    assert main(["--prompt", "word " * 600]) == 2
    assert "expected both >= 1, sum <= 512" in capsys.readouterr().out
    for wrong in (["--pages", "0"], ["--samples", "2"], ["--prompt-tokens", "0"]):
        with pytest.raises(SystemExit):
            main(wrong)


def test_program_with_samples(capsys: pytest.CaptureFixture[str]) -> None:
    for sharing, pages in (("all", 8), ("none", 0)):
        samples = ["--samples", "3", "--prompt-tokens", "70", "--sharing", sharing, "--ignore-end"]
        assert main([*samples, "--max-new-tokens", "6"]) == 0
        out = capsys.readouterr().out
        assert "+ 18 generated" in out
        assert f"pages shared          {pages} " in out
        assert "check                 passed" in out


def test_program_fails_when_the_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "FACTOR", 1e-3)
    assert main(["--prompt", "The file is", "--max-new-tokens", "5"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "error: request 0: logits differ by" in out


def test_folder_runs_as_a_program() -> None:
    command = [sys.executable, str(weights.FOLDER), "--requests", "2", "--rate", "99"]
    command += ["--max-new-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
    assert "\x1b" not in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of 60 columns is sent while one request is served."""
    for name, value in (("COLUMNS", "60"), ("LINES", "24"), ("TERM", "xterm")):
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.delitem(os.environ, "NO_COLOR", raising=False)
    monkeypatch.setattr("serve.display._REWRITE_SECONDS", 0.0)
    out = Terminal()
    display = Display(out, Tokenizer.load(weights.TOKENIZER), total=1, stream=False)
    serving = engine()
    serving.submit(Request(0, prompt(9, seed=0), 8))
    with closing(display):
        while serving.busy:
            display.step(serving.step(), serving)
    display.table({"requests": "1 in 0.1 s"})
    return out.getvalue()


def test_terminal_rewrites_its_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on_a_terminal(monkeypatch)
    assert shown.count("\x1b[1A\x1b[2K") >= 5  # up to the line of progress, from that of the text
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "-- request 0" in plain
    assert max(len(row) for row in re.split(r"[\r\n]", plain)) < 80
    assert all(len(row) < 60 for row in re.split(r"[\r\n]", plain) if "pages  " in row)
    assert "requests" in plain.splitlines()[-1]


def test_without_rich_a_terminal_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "rich" else find(n))
    monkeypatch.setattr("serve.display._LINE_SECONDS", 0.0)
    shown = shown_on_a_terminal(monkeypatch)
    assert "\x1b" not in shown
    assert "-- request 0" in shown
    assert " running, " in shown
    assert shown.splitlines()[-1] == "requests              1 in 0.1 s"


def test_lines_fit_a_terminal(capsys):
    assert main(["--requests", "8", "--rate", "1000"]) == 0
    text = capsys.readouterr().out
    assert "write nonsense" in text
    assert max(len(line) for line in text.splitlines()) <= 80
