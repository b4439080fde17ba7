"""The scheduler asks the rules of outrider.actors.round.scheduling with its own numbers."""

from types import SimpleNamespace

from outrider.actors.round.scheduling import MAX_OVERTAKING_S, FairOrder, prefill_threshold
from outrider.actors.vllm_adapter.scheduler import FairScheduling
from tests.support.clock import Clock


class Base:
    """Has as much of vLLM's scheduler as the mixin touches."""

    def __init__(self):
        serving = {"gateway": {"keys_file": "keys.yaml"}}
        self.vllm_config = SimpleNamespace(additional_config={"outrider": {"serving": serving}})
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=1000,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
        )
        self.num_spec_tokens = 4
        self.running, self.waiting = [], []
        self.added = []

    def add_request(self, request):
        self.added.append(request)

    def schedule(self, throttle_prefills=False):
        return self.scheduler_config.long_prefill_token_threshold, throttle_prefills


class Scheduler(FairScheduling, Base):
    pass


def request(tokens, priority=0, **ours):
    params = SimpleNamespace(extra_args={"outrider": ours} if ours else None)
    fields = {"request_id": "r", "num_prompt_tokens": tokens, "max_tokens": 16, "priority": priority}
    return SimpleNamespace(sampling_params=params, **fields)


def arriving(arrivals):
    """Return a scheduler to which these have come: by the monotonic clock, and what."""
    clock = Clock()
    scheduler = Scheduler(arrival_clock=clock)
    for clock.now, each in arrivals:
        scheduler.add_request(each)
    return scheduler


def test_waiting_requests_are_ordered_by_virtual_arrival():
    scheduler = arriving([(100.0, request(5000)), (102.0, request(10)), (112.0, request(10))])
    huge, small, late = (added.priority for added in scheduler.added)
    assert small < huge < late
    assert huge == FairOrder(MAX_OVERTAKING_S).virtual_arrival_ms(100.0, 5000, 16)


def test_callers_are_told_apart():
    much = [(100.0 + number / 1000, request(10, caller=7)) for number in range(100)]
    scheduler = arriving([*much, (100.5, request(10, caller=8))])
    *much, little = (added.priority for added in scheduler.added)
    assert sum(one > little for one in much) > 80


def test_long_prompts_share_a_step_in_every_step():
    scheduler = Scheduler()
    assert scheduler.schedule() == (750, False)
    scheduler.running = [SimpleNamespace(is_prefill_chunk=chunk) for chunk in (True, False, True)]
    assert scheduler.schedule(throttle_prefills=True) == (375, True)
    scheduler.running = [SimpleNamespace(is_prefill_chunk=True)] * 400
    assert scheduler.schedule()[0] == prefill_threshold(1000, 400, at_least=5) == 5


def test_prompts_stay_whole_where_chunked_prefill_is_switched_off():
    scheduler = Scheduler()
    scheduler.scheduler_config.enable_chunked_prefill = False
    scheduler.running = [SimpleNamespace(is_prefill_chunk=True)]
    assert scheduler.schedule() == (0, False)
