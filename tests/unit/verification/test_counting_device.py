"""Checks the device that tests count synchronisations on: what it counts, refuses and poisons."""

import pytest
import torch

from tests.support.devices.counting_device import DEVICE, POISON, CountingDevice


@pytest.fixture
def device():
    with CountingDevice() as device:
        yield device


@pytest.mark.parametrize(
    "read",
    [
        lambda there: there.tolist(),
        lambda there: there[0].item(),
        lambda there: bool(there[0] == 0),
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there.to(torch.device("cpu"), torch.float32),
        lambda there: there.nonzero(),
        lambda there: there[there > 1],
        lambda there: there.index_put_((there > 1,), there[:2].clone()),
        lambda there: there.unique_consecutive(return_inverse=True),
        lambda there: torch.empty(4, dtype=torch.int64).copy_(there),
        lambda there: torch.empty(4, dtype=torch.int64).copy_(there, non_blocking=True),
        lambda there: torch.repeat_interleave(there, there),
    ],
)
def test_every_way_to_look_at_it_counts_once(device, read):
    there = torch.arange(4, device=DEVICE)
    read(there)
    assert len(device.reads) == 1


def test_a_copy_that_does_not_wait_is_poison_until_its_event(device):
    there, here = torch.arange(4, device=DEVICE), torch.empty(4, dtype=torch.int64, pin_memory=True)
    here.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.synchronize()  # not recorded: says nothing
    assert here.view(torch.uint8).unique().tolist() == [POISON]
    event.record()
    event.synchronize()
    assert here.tolist() == [0, 1, 2, 3]
    assert device.reads == []


@pytest.mark.parametrize("times", [0, 2])
def test_a_synchronisation_that_is_missing_or_one_too_many_is_told(device, times):
    def step() -> None:
        with device.synchronises(1, "a step"):
            torch.arange(4, device=DEVICE)
            for _ in range(times):
                torch.cuda.synchronize()

    with pytest.raises(AssertionError, match="a step: reads"):
        step()
