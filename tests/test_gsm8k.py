"""bench/gsm8k.py: prompts with shared headers whose answers are right, and what it concludes from passes over them."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("click", reason="the command line's packages are not installed")
pytest.importorskip("rich", reason="the command line's packages are not installed")


@pytest.fixture
def gsm8k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("gsm8k")


@pytest.fixture
def asked(gsm8k: ModuleType) -> list[Any]:
    prompts: list[Any] = gsm8k.prompts(headers=3, questions=5, shots=4, seed=7)
    return prompts


def made(gsm8k: ModuleType, name: str, answers: list[str], hit_tokens: int = 0) -> Any:
    return gsm8k.Pass(name, {gsm8k.GREEDY: answers, gsm8k.SAMPLED: answers}, 1.0, 100, hit_tokens, 0)


def test_consecutive_prompts_have_different_headers_and_later_ones_the_same_again(asked: list[Any]) -> None:
    heads = [prompt.text.rsplit("Question:", 1)[0] for prompt in asked]
    assert len(asked) == 15
    assert heads[:3] * 5 == heads
    assert len(set(heads)) == 3
    assert len({prompt.text for prompt in asked}) == 15


def test_worked_problems_come_to_the_number_they_name(asked: list[Any]) -> None:
    for prompt in asked:
        for sums, answer in re.findall(r"Answer: (.+?)\n#### (\d+)", prompt.text):
            assert int(answer) > 0
            for left, right in re.findall(r"([\d+*/ -]*[+*/-][\d+*/ -]*) = \$?(\d+)", sums):
                assert eval(left.strip(" +*/-")) == int(right), sums  # noqa: S307 - digits and signs of our own


def test_prompts_come_from_the_seed_alone(gsm8k: ModuleType, asked: list[Any]) -> None:
    assert asked == gsm8k.prompts(headers=3, questions=5, shots=4, seed=7)
    assert asked != gsm8k.prompts(headers=3, questions=5, shots=4, seed=8)


@pytest.mark.parametrize(
    ("again", "on", "hits", "is_fine"),
    [
        (["a"] * 15, ["a"] * 15, 50, True),
        (["a"] * 15, ["a"] * 15, 0, False),
        (["a"] * 15, ["b"] + ["a"] * 14, 50, False),
        (["b"] + ["a"] * 14, ["b"] + ["a"] * 14, 50, True),
    ],
    ids=["the same", "nothing was a hit", "one differs", "as many as without offloading"],
)
def test_the_verdict_is_about_answers_that_differ_with_offloading_only(
    gsm8k: ModuleType, asked: list[Any], again: list[str], on: list[str], hits: int, is_fine: bool
) -> None:
    passes = [
        made(gsm8k, gsm8k.OFF, ["a"] * 15),
        made(gsm8k, gsm8k.OFF_AGAIN, again),
        made(gsm8k, gsm8k.ON, on, hits),
        made(gsm8k, gsm8k.RESTARTED, on, hits),
    ]
    _, fine = gsm8k.verdict(passes, asked)
    assert fine is is_fine


def test_without_lm_eval_it_says_how_to_get_it(
    gsm8k: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gsm8k.shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", "--root", str(tmp_path), "--lm-eval", "some/model"])
    with pytest.raises(SystemExit, match=re.escape("pip install 'lm_eval[api]'")):
        gsm8k.main()
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
