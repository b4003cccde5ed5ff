"""The classifiers: sizes, results compared with separate layers, and unsupported options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from networks import NETWORKS, build_network, initialize

CLASSIFIERS = [name for name in NETWORKS if name != "unet"]
IMAGES = ["mnist_cnn", "lenet", "cifar_cnn"]


def build(name: str, shape: tuple[int, ...] = (), **options: Any) -> torch.nn.Module:
    if name == "reuters_cnn":
        shape, options = (300,), {"vocabulary": 50, **options}
    network = build_network(name, shape=shape or (1, 28, 28), **{"classes": 10, **options})
    initialize(network, torch.Generator().manual_seed(0), "glorot", bias=0.1)
    return network.eval()


def samples(name: str, count: int = 2, shape: tuple[int, ...] = (1, 28, 28)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "reuters_cnn":
        return torch.randint(0, 50, (count, 300), generator=generator)
    return torch.rand((count, *shape), generator=generator)


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("mnist_cnn", (1, 28, 28), {}, 1_199_882),
        ("lenet", (1, 28, 28), {}, 129_068),
        ("reuters_cnn", (300,), {"classes": 46, "vocabulary": 30_982}, 332_856),
        ("cifar_cnn", (3, 32, 32), {}, 287_008 + 2048 * 128 + 128 + 1290),
    ],
)
def test_numbers_of_parameters(name: str, shape: tuple[int, ...], options: dict[str, Any], count: int) -> None:
    assert sum(parameter.numel() for parameter in build(name, shape, **options).parameters()) == count


ORDERS = {
    "mnist_cnn": "conv1 relu conv2 relu max2 flatten dense1 relu dense2",
    "lenet": "conv1 relu average conv2 relu average flatten dense1 relu dense2",
    "reuters_cnn": "embedding transpose conv1 relu max1 conv2 relu max1 flatten dense",
}
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "max1": lambda x: F.max_pool1d(x, 2),
    "max2": lambda x: F.max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
    "transpose": lambda x: x.transpose(1, 2),
    "flatten": lambda x: x.reshape(len(x), -1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_results_equal_those_of_separate_layers(name: str) -> None:
    network, x = build(name), samples(name)
    y = x
    for step in ORDERS[name].split():
        y = OPERATIONS[step](y) if step in OPERATIONS else network.get_submodule(step)(y)
    assert torch.allclose(network(x), y, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_cifar_cnn_equals_separate_layers(norm: str) -> None:
    network, x = build("cifar_cnn", (3, 32, 32), norm=norm).train(), samples("cifar_cnn", 4, (3, 32, 32))
    weights = [parameter for parameter in network.parameters() if parameter.dim() == 4]
    assert [len(weight) for weight in weights] == [32, 32, 64, 64, 128, 128]
    y = x
    for number, weight in enumerate(weights):
        y = F.conv2d(y, weight, torch.full((len(weight),), 0.1), padding=1)
        y = F.relu(y if norm == "none" else F.batch_norm(y, None, None, training=True))
        y = F.max_pool2d(y, 2) if number % 2 else y
    dense = network.state_dict()
    y = F.relu(y.flatten(1) @ dense["dense1.weight"].T + dense["dense1.bias"])
    assert torch.allclose(network(x), y @ dense["dense2.weight"].T + dense["dense2.bias"], atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_compiles_to_one_graph_and_supports_channels_last(name: str) -> None:
    torch._dynamo.reset()
    network, x = build(name), samples(name)
    expected = network(x)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected, atol=1e-5)
    if name in IMAGES:
        network.to(memory_format=torch.channels_last)
        assert torch.allclose(network(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5)


@pytest.mark.parametrize(("name", "least"), [("mnist_cnn", 6), ("lenet", 14), ("cifar_cnn", 8)])
def test_images_below_the_minimum_size_are_refused(name: str, least: int) -> None:
    shape = (3, least, least)
    assert build(name, shape)(samples(name, 2, shape)).shape == (2, 10)
    for smaller in ((3, least - 1, 40), (3, 40, least - 1)):
        with pytest.raises(ValueError, match=f"network {name} needs images of at least {least} .*not "):
            build(name, smaller)


TEXTS = {"shape": (300,), "classes": 10, "vocabulary": 50}
LABELED = {"shape": (1, 28, 28), "classes": 10}
VOLUMES = {"crop": 8, "in_channels": 4, "out_channels": 5, "width": 4, "scales": 2}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg", VOLUMES, "^network.name: unknown network vgg; known: unet;"),
        ("vgg", LABELED, "known: mnist_cnn, lenet, reuters_cnn, cifar_cnn;"),
        ("vgg", TEXTS, "known: reuters_cnn;"),
        ("lenet", TEXTS, "network lenet cannot be used with texts; use reuters_cnn"),
        ("lenet", VOLUMES, "network lenet cannot be used with volumes; use unet"),
        ("unet", LABELED, "network unet cannot be used with labeled samples; use mnist_cnn or lenet"),
        ("reuters_cnn", LABELED, "reuters_cnn takes texts, .*use mnist_cnn"),
        ("lenet", {**LABELED, "norm": "group"}, "network lenet has no option norm; remove it"),
        ("unet", {**VOLUMES, "depth": 3}, "network unet has no option depth; remove it"),
        ("cifar_cnn", {**LABELED, "norm": "ghost(0)"}, r"unknown norm ghost\(0\); known: none"),
    ],
)
def test_a_network_refuses_samples_and_options_of_others(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(name, **options)
