import numpy as np
import torch

from outrider.actors.verification.transfer import ALIGNMENT, in_one_copy, in_one_read, to_device

ARRAYS = [
    np.arange(3),
    np.array([True, False, True]),
    np.array([0.5], np.float32),
    np.arange(0),
    np.arange(10, dtype=np.float32).reshape(5, 2),
    np.array([-1]),
    np.arange(6).reshape(3, 2).T[0],
]
CPU = torch.device("cpu")


def test_arrays_arrive_aligned_and_unchanged():
    tensors = in_one_copy(ARRAYS, CPU)
    for array, tensor, shared in zip(ARRAYS, tensors, to_device(ARRAYS, CPU), strict=True):
        assert tensor.dtype is shared.dtype
        assert tensor.tolist() == shared.tolist() == array.tolist()
    start = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - start) % ALIGNMENT == 0 for tensor in tensors if len(tensor))


def test_tensors_are_read_as_they_are_wherever_they_begin():
    tensors = [torch.from_numpy(array) for array in ARRAYS] + [torch.arange(6, dtype=torch.int32).view(2, 3).T]
    for tensor, read in zip(tensors, in_one_read(tensors), strict=True):
        assert read.dtype == tensor.dtype
        assert read.tolist() == tensor.tolist()
        assert read.numpy().flags.aligned
