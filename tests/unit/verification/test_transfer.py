import numpy as np
import torch

from outrider.actors.verification.batch import ALIGNMENT, in_one_copy, to_device


def test_arrays_arrive_aligned_and_unchanged():
    arrays = [np.arange(3), np.array([0.5], np.float32), np.arange(0), np.arange(5, dtype=np.float32), np.array([-1])]
    tensors = in_one_copy(arrays, torch.device("cpu"))
    for array, tensor, shared in zip(arrays, tensors, to_device(arrays, torch.device("cpu")), strict=True):
        assert tensor.dtype is shared.dtype
        assert tensor.tolist() == shared.tolist() == array.tolist()
    start = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - start) % ALIGNMENT == 0 for tensor in tensors if len(tensor))
