"""One module per loader, and the kernels that cut crops."""
