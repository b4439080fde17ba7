"""Prompts of three domains, made from templates, for a stream of requests that shifts from one to another.

python -m tests.bench.domain_prompts general 600 > general.jsonl     # messages, as `outrider distill --chat` takes
"""

from __future__ import annotations

import json
import random
import sys


def _words(text: str) -> list[str]:
    return text.split(", ")


_THINGS = _words(
    "bread, rain, gold, salt, glass, paper, wind, snow, tea, coffee, rice, wool, silk, iron, copper, cheese, "
    "honey, sugar, soap, bridges, clocks, bicycles, trains, boats, maps, books, pianos, violins, gardens, "
    "forests, rivers, mountains, deserts, islands, cats, dogs, horses, bees, whales, eagles, owls, wolves, "
    "foxes, bears"
)
_QUESTIONS = (
    "What is {0} good for?",
    "Tell me something about {0}.",
    "How do {0} and {1} differ?",
    "Write a short note about {0} for a child.",
    "Why do people like {0}?",
    "Where do {0} come from?",
    "Name three facts about {0}.",
    "Write a letter to a friend about {0} and {1}.",
)
_VERBS = _words(
    "reverse, sort, count, sum, merge, filter, join, split, rotate, flatten, compare, search, remove, double, square"
)
_OBJECTS = _words(
    "a list of numbers, a string, two lists, a dictionary, a list of words, a matrix, a set, a tuple, a "
    "linked list, a file's lines"
)
_CODE = (
    "Write a Python function that {verbs} {object}.",
    "Write a Python function to {verb} {object}, with a docstring and an example.",
    "Show Python code that can {verb} {object} without any import.",
    "Write a Python class with a method to {verb} {object}.",
)
_NAMES = _words("Ann, Ben, Cara, Dan, Eva, Finn, Gus, Hana, Ian, Jo, Kim, Leo, Mia, Ned, Ola, Pia")
_GOODS = _words("apples, pens, books, coins, cards, eggs, stamps, shells, marbles, tickets")
_SUMS = (
    "{n} has {a} {g} and buys {b} more. How many {g} does {n} have? Explain step by step.",
    "{n} has {a} {g} and gives {b} to a friend. How many are left? Explain step by step.",
    "A box holds {a} {g}. How many {g} are in {b} boxes? Show each step.",
    "What is {a} + {b} * {c}? Show each step.",
    "{n} shares {a} {g} among {c} friends. How many does each get, and how many are left over?",
    "What is {a} minus {b}, then times {c}? Show each step.",
)

DOMAINS = ("general", "code", "math")


def prompts(domain: str, count: int, seed: int = 0) -> list[str]:
    """count of them, no two alike while there are others."""
    chance = random.Random(f"{domain} {seed}")
    made: dict[str, None] = {}
    for _ in range(50 * count):
        if len(made) == count:
            break
        if domain == "general":
            text = chance.choice(_QUESTIONS).format(*chance.sample(_THINGS, 2))
        elif domain == "code":
            verb = chance.choice(_VERBS)
            text = chance.choice(_CODE).format(verb=verb, verbs=f"{verb}s", object=chance.choice(_OBJECTS))
        elif domain == "math":
            text = chance.choice(_SUMS).format(
                n=chance.choice(_NAMES),
                g=chance.choice(_GOODS),
                a=chance.randrange(12, 99),
                b=chance.randrange(2, 30),
                c=chance.randrange(2, 9),
            )
        else:
            raise ValueError(f"{domain}: unknown; one of {', '.join(DOMAINS)}")
        made[text] = None
    return list(made)


def main() -> None:
    domain, count = sys.argv[1], int(sys.argv[2])
    for text in prompts(domain, count):
        print(json.dumps({"messages": [{"role": "user", "content": text}]}))


if __name__ == "__main__":
    main()
