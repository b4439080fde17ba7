"""Implements ``make demo``: serves a small model and compares one answer with and without speculation."""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Sequence

from outrider.deploy.bench.servers import ServerProcess
from outrider.deploy.cli.arguments import exit_status
from outrider.deploy.cli.generate import print_text
from outrider.deploy.client.requests import GenerationOptions
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb

PRESET = "smollm2"
DTYPE = "float32"
"""With float32, steps of one and of several tokens round alike, so that both ways give the same tokens."""

PROMPT = """Shorten this text a little:

The old lighthouse stands on a rock two miles from the harbour. Every evening the keeper climbs the stairs, cleans the \
glass, and lights the lamp. In summer he grows tomatoes in wooden boxes and sells them to the fishermen. In winter the \
sea is too rough for boats, and nobody comes for weeks. He reads by the stove, feeds his two cats, and writes down the \
weather in a big green book. When spring comes, the first boat brings him letters, coffee and a new lamp."""
"""The answer repeats much of this prompt."""

OPTIONS = GenerationOptions(apply_chat_template=True, temperature=0.0, max_tokens=160)
PLAIN = GenerationOptions(**OPTIONS, speculation=False)
PAIRS = 3


def main() -> int:
    progress = Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = ServerProcess(PRESET, "--dtype", DTYPE)

    def work() -> None:
        progress.say(f"starting: outrider serve {PRESET} --dtype {DTYPE}")
        try:
            with OutriderClient(server.start(lambda: None)) as client:
                show(client, progress)
        finally:
            progress.say("shutting down")
            server.stop()
        print(f"Next: outrider serve {PRESET}, then http://127.0.0.1:8000/ in a browser", flush=True)

    return exit_status("demo", work, verbose=False)


def show(client: OutriderClient, progress: Progress) -> None:
    """Streams one answer, then repeats the same request with and without speculation, in turns."""
    print(f"\n{PROMPT}\n")
    print_text(client, PROMPT, OPTIONS)
    client.generate(PROMPT, **PLAIN)  # each kind of step is warm after it
    drafted, plain = [], []
    for pair in range(1, PAIRS + 1):
        progress.say(f"the same again, with speculation and without: {pair} of {PAIRS}")
        drafted.append(client.generate(PROMPT, **OPTIONS))
        plain.append(client.generate(PROMPT, **PLAIN))
    print(f"\n{comparison(drafted, plain)}\n", flush=True)


def comparison(drafted: Sequence[pb.GenerateResponse], plain: Sequence[pb.GenerateResponse]) -> str:
    """Returns the median speeds of both ways, their ratio, the tokens of a round, and whether all tokens are the same.

    A speed is that of the tokens after the first one.
    """
    lines, speeds = [], []
    for name, side in (("with speculation", drafted), ("without", plain)):
        speeds.append(statistics.median((len(each.token_ids) - 1) / each.metrics.timing.decode_time_s for each in side))
        per_round = statistics.fmean(each.metrics.speculative_decoding.mean_acceptance_length for each in side)
        lines.append(f"{name:<16}  {speeds[-1]:6.1f} tokens/s  {per_round:5.2f} tokens a round")
    lines.append(f"{speeds[0] / speeds[1]:.2f} times as fast (medians of {len(drafted)}, in turns)")
    number = len({tuple(each.token_ids) for each in (*drafted, *plain)})
    return "\n".join([*lines, "the tokens are the same each time" if number == 1 else f"{number} DIFFERENT answers"])


if __name__ == "__main__":
    sys.exit(main())
