"""What a suffix drafter's look-up and learning cost: `python tests/bench/suffix_lookup.py [TEXT_FILE]`.

Words and signs of a text (this repository's sources without one) stand for tokens. Times are of this process's CPU, in
microseconds. Beside them, how many tokens a draft has and how many of these the text goes on with.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from pathlib import Path

from outrider.actors.drafter.suffix import SuffixProposer, SuffixSequence
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.cluster.link.messages import Commit, DraftSampling, Open

PROMPT, ANSWER, K = 4096, 1024, 8


def opened(drafter: SuffixProposer, key: tuple[int, int], prompt: list[int]) -> SuffixSequence:
    sequence = drafter.new_sequence(key)
    sequence.take_prompt(Open(key[1], prompt, 4, DraftSampling()))
    drafter.open(sequence)
    return sequence


def main() -> None:
    root = Path(__file__).parents[2]
    sources = [Path(sys.argv[1])] if len(sys.argv) > 1 else sorted(root.glob("actors/**/*.py"))
    words = re.findall(r" ?\w+|\n\s*|.", "".join(path.read_text() for path in sources))
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    text = [ids[word] for word in words]
    drafter = SuffixProposer(SuffixLimits(24, 1.0, 0.1), 10_000)
    others = text[: -(PROMPT + ANSWER)]
    started = time.process_time()
    for number, start in enumerate(range(0, len(others), 512)):
        other = opened(drafter, (2, number), [1])
        drafter.commit(other, Commit(number, 1, others[start : start + 512], 0, 0))
        drafter.close(other)
    learning = (time.process_time() - started) / len(others)
    own = text[-(PROMPT + ANSWER) :]
    started = time.process_time()
    sequence = opened(drafter, (1, 1), own[:PROMPT])
    while (work := drafter.plan()) is not None:
        work.execute()
        drafter.complete(work)
    opening = (time.process_time() - started) / PROMPT
    times, drafted, right = [], 0, 0
    for position in range(PROMPT, PROMPT + ANSWER):
        commit = Commit(1, position, own[position : position + 1], K, K)
        started = time.process_time()
        drafter.commit(sequence, commit)
        times.append(time.process_time() - started)
        ids = drafter.outbox.drain()[-1].message.token_ids
        drafted += len(ids)
        for guess, token in zip(ids, own[position + 1 :], strict=False):
            if guess != token:
                break
            right += 1
    times.sort()
    print(
        f"{platform.machine()}, Python {platform.python_version()}; {len(others)} tokens of others, {PROMPT} of prompt"
    )
    print(f"learning {learning * 1e6:.2f} us a token, reading a prompt {opening * 1e6:.2f} us a token")
    middle, late = times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6
    print(f"a commit answered in {middle:.0f} us (median), {late:.0f} us (p99), K = {K}")
    print(f"drafts of {drafted / ANSWER:.2f} tokens, {right / max(drafted, 1):.0%} of them right: {drafter.counters()}")


if __name__ == "__main__":
    main()
