"""``python -m tests.bench.training_prompts GSM8K_TRAIN INVENTED... > prompts.jsonl``: prompts of the shipped drafter.

Chats that the target made up itself (as in Magpie, arXiv 2406.08464), questions of GSM8K's training part, the three
domains of `domain_prompts`, and Python functions of the interpreter's own library, cut after their docstring, to be
continued. None is of HumanEval, MT-bench or GSM8K's test part, which it is measured on.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tests.bench.domain_prompts import DOMAINS, prompts

MATHS, OF_A_DOMAIN, CODE = 4500, 400, 3000
HEAD_CHARS = (60, 450)
"""Characters of a function's head with its docstring: about 15 to 150 tokens."""

QUESTION_CHARS = 450


def function_heads(library: Path) -> Iterator[str]:
    """Yield the head of every function with a docstring, up to its end, with a method's class's line."""
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if file.parts[-2] in ("test", "tests", "site-packages", "idlelib", "lib2to3"):
            continue
        source = file.read_text(errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
                continue
            head = inspect.cleandoc("\n" + "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])) + "\n"
            if HEAD_CHARS[0] <= len(head) <= HEAD_CHARS[1] and head.isascii():
                yield head


def main() -> None:
    maths, *invented = map(Path, sys.argv[1:])
    order = random.Random(0)
    heads = sorted(set(function_heads(Path(sysconfig.get_path("stdlib")))))
    questions = [json.loads(line)["question"] for line in maths.read_text().splitlines()]
    questions = [question for question in questions if len(question) <= QUESTION_CHARS]
    rows: list[dict[str, object]] = [{"prompt": head} for head in order.sample(heads, CODE)]
    asked = order.sample(questions, MATHS)
    for domain in DOMAINS:
        asked += prompts(domain, OF_A_DOMAIN)
    rows += [{"messages": [{"role": "user", "content": text}]} for text in asked]
    rows += [json.loads(line) for file in invented for line in file.read_text().splitlines()]
    order.shuffle(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
