"""Checks the device that tests count synchronisations on: what it counts, refuses and poisons."""

import numpy as np
import pytest
import torch

from outrider.actors.verification.transfer import wait_for
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


@pytest.mark.parametrize(
    "use",
    [
        lambda there: there[torch.tensor([1], device=DEVICE)],
        lambda there: there.masked_fill(there > 1, 0),
        lambda there: there.to(torch.float32).to(DEVICE),
        lambda there: torch.where(there > 1, there, 0).sort(),
        lambda there: torch.repeat_interleave(there, there, output_size=6),
    ],
)
def test_what_stays_there_does_not(device, use):
    use(torch.arange(4, device=DEVICE))
    assert device.reads == []


def test_copies_from_ordinary_memory_are_waited_for(device):
    torch.tensor([1, 2], device=DEVICE)
    torch.from_numpy(np.arange(3)).to(DEVICE, non_blocking=True)
    assert len(device.uploads) == 2
    pinned = torch.empty(3, dtype=torch.int64, pin_memory=True)
    assert pinned.to(DEVICE, non_blocking=True).device == DEVICE
    assert len(device.uploads) == 2
    pinned.to(DEVICE)
    assert len(device.uploads) == 3
    assert torch.arange(3).pin_memory().is_pinned()
    torch.arange(3).pin_memory().to(DEVICE, non_blocking=True)
    assert len(device.uploads) == 3
    torch.zeros(2, device=DEVICE).new_tensor([1, 2])
    assert len(device.uploads) == 4


def test_what_cuda_refuses_is_refused(device):
    there = torch.arange(4, device=DEVICE)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.arange(4)


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


def test_pinned_memory_that_is_used_again_too_early_is_told(device):
    pinned = torch.zeros(4, pin_memory=True)
    there = pinned.to(DEVICE, non_blocking=True)
    pinned[0] = 1.0
    with pytest.raises(AssertionError, match="written to before its copy"):
        there.sum().item()


def wait_for_an_event():
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.cuda.synchronize(),  # the device's, which is not there yet
        lambda: wait_for(DEVICE),
        wait_for_an_event,
    ],
)
def test_whoever_waits_may_use_pinned_memory_again(wait):
    with CountingDevice() as device:
        pinned, here = torch.zeros(4, pin_memory=True), torch.empty(4, pin_memory=True)
        here.copy_(pinned.to(DEVICE, non_blocking=True) + 2, non_blocking=True)
        assert device.busy
        with device.synchronises(1, "a step"):
            wait()
        assert (device.busy, device.reads, len(device.waits)) == (False, [], 1)
        pinned[0] = 1.0
        assert here.tolist() == [2, 2, 2, 2]


def test_a_value_that_is_read_before_it_has_arrived_is_told(device):
    there = torch.arange(4, device=DEVICE)
    for here in (torch.empty(4, dtype=torch.int64, pin_memory=True), there.to("cpu", non_blocking=True)):
        event = torch.cuda.Event()
        here.copy_(there, non_blocking=True)
        event.record()
        for read in (here.tolist, here[1].item):
            with pytest.raises(AssertionError, match="read before its copy"):
                read()
        event.synchronize()
        assert here.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("times", [0, 2])
def test_a_synchronisation_that_is_missing_or_one_too_many_is_told(device, times):
    def step() -> None:
        with device.synchronises(1, "a step"):
            torch.arange(4, device=DEVICE)
            for _ in range(times):
                torch.cuda.synchronize()

    with pytest.raises(AssertionError, match="a step: reads"):
        step()
