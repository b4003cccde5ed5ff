"""The layers' operations by Triton kernels for Hopper GPUs (compute capability 9.0); layers.py has the functions."""
