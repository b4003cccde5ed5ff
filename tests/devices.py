"""Marks of tests that need a GPU."""

import pytest
import torch

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
