"""Sixteen streams at once: each answer is its single-stream answer, and nothing is left when they are done."""

import threading
from dataclasses import dataclass, field

import pytest

from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import HANG_GUARD_S, MAX_MODEL_LEN, K, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
LENGTHS = (1, 5, 16, 33, 64, 100, 127, 128, 129, 200, 300, 450, 513, 640, 799, 800)
"""Tokens of the prompts. 128 is the block size of the KV cache on CPU."""

TO_THE_END, STOPPED, CUT, ABORTED = 15, 4, 7, 9
"""Which of the prompts runs into max_model_len, ends at a stop string, at max_tokens, and is cancelled."""


def prompt_of(index):
    """No two share a first token, so that no prefix is cached for another."""
    text = bytes([65 + index]) + TEXT * 8
    return list(text[: LENGTHS[index]])


@dataclass
class Answer:
    text: str = ""
    blocks: list[list[int]] = field(default_factory=list)
    num_rounds: list[int] = field(default_factory=list)
    """The rounds that each block tells of."""

    last: pb.GenerateStreamResponse | None = None
    error: Exception | None = None

    @property
    def tokens(self):
        return [token for block in self.blocks for token in block]


def stream(client, prompt, cancel_after=None, **options):
    answer = Answer()
    try:
        with client.stream(prompt, temperature=0.0, **options) as messages:
            for message in messages:
                answer.text += message.text_delta
                answer.blocks.append(list(message.token_ids))
                answer.num_rounds.append(message.num_rounds)
                answer.last = message
                if len(answer.blocks) == cancel_after:
                    break
    except OutriderError as error:
        answer.error = error
    return answer


@pytest.fixture(scope="module")
def single(deployments):
    """Every prompt's answer when it is alone, long enough for what each is asked for later."""
    pair = deployments.use("pair")
    return [
        stream(pair.client, prompt_of(i), **({} if i == TO_THE_END else {"max_tokens": 64}))
        for i in range(len(LENGTHS))
    ]


def middle_of_a_block(answer, first=8):
    """How many tokens of an answer end inside one of its accepted blocks, after at least `first` tokens."""
    done = 0
    for block in answer.blocks:
        if done >= first and len(block) >= 3:
            return done + 2
        done += len(block)
    raise AssertionError("no block of three tokens: the pair agrees too rarely")


def stop_string(answer):
    """(stop string, how many characters come before it): it first occurs where it ends inside a block."""
    end = middle_of_a_block(answer)
    for length in range(2, end):
        stop = answer.text[end - length : end]
        if answer.text.find(stop) == end - length:
            return stop, end - length
    raise AssertionError("no such string")


def test_single_answers_are_the_reference_s(pair, single):
    for index, answer in enumerate(single):
        assert answer.error is None
        pair.reference.check(prompt_of(index), answer.tokens, label=f"prompt {index}")


def test_sixteen_streams_at_once(pair, single):
    stop, before_stop = stop_string(single[STOPPED])
    cut = middle_of_a_block(single[CUT])
    options = [{"max_tokens": 48} for _ in LENGTHS]
    options[TO_THE_END] = {}
    options[STOPPED] = {"max_tokens": 64, "stop": stop}
    options[CUT] = {"max_tokens": cut}
    options[ABORTED] = {"cancel_after": 3}
    answers = [None] * len(LENGTHS)
    before = pair.status().rounds

    def ask(index):
        answers[index] = stream(pair.client, prompt_of(index), **options[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(LENGTHS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S * 2)
    wait_until_idle(pair, HANG_GUARD_S)
    assert pair.drafter_status()["num_sequences"] == 0

    for index, answer in enumerate(answers):
        assert answer is not None, f"prompt {index} never ended"
        assert answer.error is None, f"prompt {index}: {answer.error}"
        if index != STOPPED:
            expected = single[index].tokens[: len(answer.tokens)]
            pair.reference.check(prompt_of(index), answer.tokens, expected, f"prompt {index} of 16")
        if index != ABORTED:
            usage = answer.last.usage
            assert usage.prompt_tokens == LENGTHS[index]
            assert usage.completion_tokens == len(answer.tokens)
            assert len(answer.text) <= len(answer.tokens)
        if index not in (ABORTED, STOPPED):
            assert answer.last.finish_reason == pb.FINISH_REASON_LENGTH
            assert answer.text == bytes(answer.tokens).decode()
    assert len(answers[TO_THE_END].tokens) + LENGTHS[TO_THE_END] == MAX_MODEL_LEN
    assert answers[TO_THE_END].last.usage.total_tokens == MAX_MODEL_LEN
    assert len(answers[CUT].tokens) == cut
    stopped = answers[STOPPED]
    assert stopped.last.finish_reason == pb.FINISH_REASON_STOP
    assert stopped.last.stop_reason == stop
    assert stopped.text == single[STOPPED].text[:before_stop]
    assert len(answers[ABORTED].blocks) == 3
    for answer in answers:
        for block, rounds in zip(answer.blocks, answer.num_rounds, strict=True):
            assert len(block) <= max(1, rounds) * (K + 1)
    after = pair.status().rounds
    assert after.accepted > before.accepted, "speculation went on in the batch"
    print(f"near-ties so far: {len(pair.reference.ties)}")


def test_a_stop_string_inside_a_block_leaves_the_tokens_plain_decoding_leaves(pair, single):
    """What comes after the stop in the same round was accepted by the target, but is no part of the answer."""
    stop, before_stop = stop_string(single[STOPPED])
    options = {"temperature": 0.0, "max_tokens": 64, "stop": stop}
    answer = pair.client.generate(prompt_of(STOPPED), **options)
    plain = pair.client.generate(prompt_of(STOPPED), speculation=False, **options)
    assert answer.text == plain.text == single[STOPPED].text[:before_stop]
    assert list(answer.token_ids) == list(plain.token_ids)
    assert answer.usage.completion_tokens == plain.usage.completion_tokens == before_stop + len(stop)
