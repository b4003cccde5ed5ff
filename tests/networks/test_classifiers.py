"""The classifiers: sizes, results compared with separate layers, and unsupported options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from networks import build_network, initialize

TEXTS = {"shape": (300,), "classes": 46, "vocabulary": 30_982}
MNIST = {"shape": (1, 28, 28), "classes": 10}
CIFAR = {"shape": (3, 32, 32), "classes": 10}
BLOCKS = " ".join(f"blocks.{at} norm relu blocks.{at + 3} norm relu max2" for at in (0, 7, 14))
# Samples, the number of parameters, and the order of the layers.
CLASSIFIERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "mnist_cnn": (MNIST, 1_199_882, "conv1 relu conv2 relu max2 flatten dense1 relu dense2"),
    "lenet": (MNIST, 129_068, "conv1 relu average conv2 relu average flatten dense1 relu dense2"),
    "reuters_cnn": (TEXTS, 332_856, "embedding transpose conv1 relu max1 conv2 relu max1 flatten dense"),
    "cifar_cnn": (CIFAR, 287_008 + 2048 * 128 + 128 + 1290, f"{BLOCKS} flatten dense1 relu dense2"),
}
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "norm": lambda x: x,
    "max1": lambda x: F.max_pool1d(x, 2),
    "max2": lambda x: F.max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
    "transpose": lambda x: x.transpose(1, 2),
    "flatten": lambda x: x.reshape(len(x), -1),
}


@pytest.mark.parametrize(("name", "norm"), [*((name, {}) for name in CLASSIFIERS), ("cifar_cnn", {"norm": "batch"})])
def test_a_classifier_equals_its_separate_layers_compiled_and_channels_last(name: str, norm: dict[str, str]) -> None:
    torch._dynamo.reset()
    options, parameters, order = CLASSIFIERS[name]
    network = build_network(name, **options, **norm)
    initialize(network, torch.Generator().manual_seed(0), "glorot", bias=0.1)
    network.train(bool(norm))  # dropout needs evaluation mode
    assert norm or sum(parameter.numel() for parameter in network.parameters()) == parameters
    generator = torch.Generator().manual_seed(1)
    shape = (4, *options["shape"])
    x = torch.randint(0, 50, shape, generator=generator) if name == "reuters_cnn" else torch.rand(shape)
    normal = (lambda x: F.batch_norm(x, None, None, training=True)) if norm else OPERATIONS["norm"]
    expected = x
    for layer in order.split():
        operation = {**OPERATIONS, "norm": normal}.get(layer) or network.get_submodule(layer)
        expected = operation(expected)
    assert torch.allclose(network(x), expected, atol=1e-4)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, atol=1e-4)
    if x.dim() == 4:
        network.to(memory_format=torch.channels_last)
        assert torch.allclose(network(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-4)


@pytest.mark.parametrize(("name", "least"), [("mnist_cnn", 6), ("lenet", 14), ("cifar_cnn", 8)])
def test_images_below_the_minimum_size_are_refused(name: str, least: int) -> None:
    shape = (3, least, least)
    assert build_network(name, shape=shape, classes=10)(torch.rand(2, *shape)).shape == (2, 10)
    for smaller in ((3, least - 1, 40), (3, 40, least - 1)):
        with pytest.raises(ValueError, match=f"network {name} needs images of at least {least} .*not "):
            build_network(name, shape=smaller, classes=10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", TEXTS, "network lenet cannot be used with texts; use reuters_cnn"),
        ("unet", MNIST, "network unet cannot be used with labeled samples; use mnist_cnn or lenet"),
        ("reuters_cnn", MNIST, "reuters_cnn takes texts, .*use mnist_cnn"),
        ("lenet", {**MNIST, "norm": "group"}, "network lenet has no option norm; remove it"),
        ("lenet", {**MNIST, "conditions": [[0.0, 1.0]]}, r"lenet takes no conditions; remove network\.conditions"),
    ],
)
def test_a_network_refuses_samples_and_options_of_others(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(name, **options)
