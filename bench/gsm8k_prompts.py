"""Few-shot prompts in the shape of gsm8k's, and a tokenizer for them: all of it generated, nothing downloaded.

A header is a few worked word problems; each is shared by many questions. The numbers and names come from a seed.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

NAMES = ("Ada", "Bo", "Chen", "Dalia", "Emre", "Farah", "Gil", "Hana", "Ines", "Jo")
THINGS = ("apples", "stamps", "marbles", "tickets", "books", "shells", "coins", "pens")
PLACES = ("market", "library", "harbour", "school", "garden", "station")


class Problem(NamedTuple):
    """A word problem, its solution in words, and the number it comes to."""

    question: str
    solution: str
    answer: int


class Prompt(NamedTuple):
    """A header and a question, as they are sent, and the number that would be right."""

    text: str
    answer: int


def _sharing(rng: random.Random, name: str, thing: str) -> Problem:
    bags, each, given = rng.randint(3, 12), rng.randint(4, 25), rng.randint(2, 11)
    total, left = bags * each, bags * each - given
    return Problem(
        f"{name} has {bags} bags with {each} {thing} in each. {name} gives {given} {thing} to a friend at the "
        f"{rng.choice(PLACES)}. How many {thing} does {name} have left?",
        f"In all bags there are {bags} * {each} = {total} {thing}. After giving away {given}, there are {total} - "
        f"{given} = {left} {thing} left.",
        left,
    )


def _earning(rng: random.Random, name: str, thing: str) -> Problem:
    days, sold, price, rent = rng.randint(3, 9), rng.randint(5, 30), rng.randint(2, 9), rng.randint(5, 25)
    total = days * sold * price - rent
    return Problem(
        f"On each of {days} days {name} sells {sold} {thing} for ${price} a piece, and pays ${rent} once for a stand "
        f"at the {rng.choice(PLACES)}. How much money does {name} make?",
        f"{name} sells {days} * {sold} = {days * sold} {thing} for {days * sold} * {price} = ${days * sold * price}. "
        f"After the rent there are {days * sold * price} - {rent} = ${total}.",
        total,
    )


def _travelling(rng: random.Random, name: str, thing: str) -> Problem:
    speed, hours, stops, minutes = rng.randint(8, 60), rng.randint(2, 9), rng.randint(1, 6), rng.randint(5, 30)
    total = hours * 60 + stops * minutes
    return Problem(
        f"{name} brings {thing} to the {rng.choice(PLACES)}, which is {speed * hours} kilometres away, at {speed} "
        f"kilometres an hour, and stops {stops} times for {minutes} minutes. How many minutes does it take {name}?",
        f"Driving takes {speed * hours} / {speed} = {hours} hours, or {hours * 60} minutes. The stops take {stops} * "
        f"{minutes} = {stops * minutes} minutes. Together {hours * 60} + {stops * minutes} = {total} minutes.",
        total,
    )


_KINDS: tuple[Callable[[random.Random, str, str], Problem], ...] = (_sharing, _earning, _travelling)


def problem(rng: random.Random) -> Problem:
    """A new one."""
    return rng.choice(_KINDS)(rng, rng.choice(NAMES), rng.choice(THINGS))


def prompts(headers: int, questions: int, shots: int, seed: int) -> list[Prompt]:
    """`questions` for each of `headers`, in an order in which consecutive ones have different headers."""
    rng = random.Random(seed)
    heads = ["".join(_worked(problem(rng)) for _ in range(shots)) for _ in range(headers)]
    asked = []
    for _ in range(questions):
        for head in heads:
            one = problem(rng)
            asked.append(Prompt(f"{head}Question: {one.question}\nAnswer:", one.answer))
    return asked


def _worked(one: Problem) -> str:
    return f"Question: {one.question}\nAnswer: {one.solution}\n#### {one.answer}\n\n"


def write_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int) -> None:
    """Byte-level BPE of `vocabulary` tokens, trained on `texts`, as a model's folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]  # 0, 1 and 2, as in the tiny models' configs
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": special[0], "bos_token": special[1], "eos_token": special[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
