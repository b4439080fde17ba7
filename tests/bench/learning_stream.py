"""What a drafter learns from a stream that shifts from one domain to another, without a server.

    python -m tests.bench.learning_stream --target T --drafter D --answers 192 --out stream

The target answers prompts of each domain in turn. Every batch of answers is first drafted for by the version that
serves and by the drafter as it was (greedy, rounds of three drafts), then taught, as a verifier teaches. Learning, its
replay and its gate are the served ones (actors/learning/learner.py); time is counted in tokens of traffic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.actors.learning.draft_models import load
from outrider.actors.learning.learner import Learner
from outrider.actors.learning.texts import TOP, Text, general_texts
from outrider.actors.vllm_adapter.offline_answers import Engine, OfflineAnswers
from outrider.cluster.config import LearningConfig
from outrider.cluster.link.messages import TAUGHT_TOP
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill.models import ends_of, load_tokenizer
from outrider.deploy.distill.rounds import Tally
from outrider.deploy.distill.texts import Job, texts_of
from tests.bench.domain_prompts import prompts

K = 3
PROMPT_TOKENS = 128
"""At most, the template among them."""


def taught_of(text: Text, prompt: int) -> Text:
    return replace(text, prompt=prompt, top_ids=text.top_ids[:, :TAUGHT_TOP], top_log_p=text.top_log_p[:, :TAUGHT_TOP])


def answers(args: argparse.Namespace) -> dict[str, list[Text]]:
    """By domain."""
    tokenizer = load_tokenizer(args.target)
    document = json.loads((args.target / "config.json").read_text())
    longest = args.max_tokens + PROMPT_TOKENS
    engine = Engine(str(args.target), document, "float32", "cpu", longest, TOP, tuple(sorted(ends_of(args.target))))
    made = {}
    with OfflineAnswers(engine) as generator:
        for domain in args.domains.split(","):
            asked = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
                for text in prompts(domain, args.answers, seed=1)
            ]
            job = Job(0, 0, tuple(range(len(asked))))
            texts = texts_of(job, asked, generator.of(asked, args.max_tokens, None))
            made[domain] = [text for text in texts if len(text.ids) - text.start > K]
    return made


def tally(learner: Learner, tensors: Mapping[str, torch.Tensor], texts: list[Text]) -> Tally:
    """Rounds of K drafts along the texts, as these tensors would have drafted them."""
    found = Tally(K)
    with learner.holding(tensors) as trainer:
        for same, _ in trainer.drafted(texts):
            found.add(same.tolist()[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--domains", default="code,math,general")
    parser.add_argument("--answers", type=int, default=192, help="of each domain")
    parser.add_argument("--batch", type=int, default=16, help="answers that come together")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--general", help="texts of outrider distill, see drafter.learn.general")
    parser.add_argument("--learn", type=json.loads, default={}, help="drafter.learn, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="OUT.json and OUT.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafter = load(args.drafter, torch.float32, "cpu")
    settings = LearningConfig(**args.learn)
    general = general_texts(args.general, int(drafter.get_output_embeddings().weight.shape[0]))
    learner = Learner(drafter, settings, dtype=torch.float32, kept_dtype=torch.bfloat16, general=general)
    start = learner.serving.tensors
    rows: list[dict[str, Any]] = []
    seen: dict[str, list[Text]] = {}
    chance = np.random.default_rng(0)
    for domain, all_texts in answers(args).items():
        for at in range(0, len(all_texts), args.batch):
            texts = all_texts[at : at + args.batch]
            rates = [
                float(tally(learner, tensors, texts).acceptance_rate) for tensors in (learner.serving.tensors, start)
            ]
            learner.add([taught_of(text, int(chance.integers(2**63))) for text in texts])
            while learner.work():
                pass
            seen.setdefault(domain, []).extend(texts)
            figures = learner.figures()
            row = {"domain": domain, "tokens": figures["tokens"], "learning": rates[0], "frozen": rates[1]}
            rows.append({**row, "version": figures["version"], "steps": figures["steps"]})
            print(rows[-1], flush=True)
    ended = {
        domain: {
            name: tally(learner, tensors, texts[-4 * args.batch :]).acceptance_rate
            for name, tensors in (("learning", learner.serving.tensors), ("frozen", start))
        }
        for domain, texts in seen.items()
    }
    figures = learner.figures()
    print(f"at the end, on each domain's last {4 * args.batch} answers: {ended}\n{figures}")
    document = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "machine": machine(()),
        "versions": versions(),
        "rows": rows,
        "ended": ended,
        "figures": figures,
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1, default=str))
    draw(rows, args.out.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [row["tokens"] / 1000 for row in rows]
    for name, colour in (("learning", "#1f6f8b"), ("frozen", "#d9822b")):
        axes.plot(tokens, [row[name] for row in rows], "o-", ms=3, color=colour, label=f"{name} drafter")
    axes.set_ylim(0, 1)
    before = None
    for row in rows:
        if row["domain"] != before:
            axes.axvline(row["tokens"] / 1000, color="grey", lw=1)
            axes.text(row["tokens"] / 1000, 0.94, f" {row['domain']}", fontsize=9)
            before = row["domain"]
    axes.set_xlabel("thousand tokens of traffic that were learned from")
    axes.set_ylabel(f"accepted of all drafts, K = {K}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
