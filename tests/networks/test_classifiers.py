"""The classifiers: sizes, results compared with separate layers, and unsupported options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from networks import NETWORKS, build_network, initialize

CLASSIFIERS = [name for name in NETWORKS if name not in ("unet", "smooth_unet")]
IMAGES = ["mnist_cnn", "lenet", "cifar_cnn"]


def build(name: str, shape: tuple[int, ...] = (), classes: int = 10, **options: Any) -> torch.nn.Module:
    if not shape:
        shape = (300,) if name == "reuters_cnn" else (1, 28, 28)
    if name == "reuters_cnn":
        options.setdefault("vocabulary", 50)
    network = build_network(name, shape=shape, classes=classes, **options)
    initialize(network, torch.Generator().manual_seed(0), "glorot", bias=0.1)
    return network.eval()


def samples(name: str, count: int = 2, shape: tuple[int, ...] = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "reuters_cnn":
        return torch.randint(0, 50, (count, *(shape or (300,))), generator=generator)
    return torch.rand((count, *(shape or (1, 28, 28))), generator=generator)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "vocabulary", "count"),
    [
        ("mnist_cnn", (1, 28, 28), 10, None, 1_199_882),
        ("lenet", (1, 28, 28), 10, None, 129_068),
        ("reuters_cnn", (300,), 46, 30_982, 332_856),
        ("cifar_cnn", (3, 32, 32), 10, None, 287_008 + 2048 * 128 + 128 + 1290),
    ],
)
def test_numbers_of_parameters(
    name: str, shape: tuple[int, ...], classes: int, vocabulary: int | None, count: int
) -> None:
    options = {} if vocabulary is None else {"vocabulary": vocabulary}
    network = build_network(name, shape=shape, classes=classes, **options)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def mnist_cnn_layers(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = F.relu(F.conv2d(x, weights["conv1.weight"], weights["conv1.bias"]))
    y = F.max_pool2d(F.relu(F.conv2d(y, weights["conv2.weight"], weights["conv2.bias"])), 2).reshape(2, 9216)
    y = F.relu(y @ weights["dense1.weight"].T + weights["dense1.bias"])
    return y @ weights["dense2.weight"].T + weights["dense2.bias"]


def lenet_layers(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = F.avg_pool2d(F.relu(F.conv2d(x, weights["conv1.weight"], weights["conv1.bias"])), 2)
    y = F.avg_pool2d(F.relu(F.conv2d(y, weights["conv2.weight"], weights["conv2.bias"])), 2).reshape(2, 800)
    y = F.relu(y @ weights["dense1.weight"].T + weights["dense1.bias"])
    return y @ weights["dense2.weight"].T + weights["dense2.bias"]


def reuters_cnn_layers(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = weights["embedding.weight"][x].permute(0, 2, 1)
    y = F.max_pool1d(F.relu(F.conv1d(y, weights["conv1.weight"], weights["conv1.bias"])), 2)
    y = F.max_pool1d(F.relu(F.conv1d(y, weights["conv2.weight"], weights["conv2.bias"])), 2)
    return y.reshape(2, 2336) @ weights["dense.weight"].T + weights["dense.bias"]


@pytest.mark.parametrize("layers", [mnist_cnn_layers, lenet_layers, reuters_cnn_layers])
def test_results_equal_those_of_separate_layers(layers: Any) -> None:
    name = layers.__name__.removesuffix("_layers")
    network, x = build(name), samples(name)
    assert torch.allclose(network(x), layers(network.state_dict(), x), atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_cifar_cnn_equals_separate_layers(norm: str) -> None:
    for shape in ((3, 32, 32), (1, 8, 8)):
        network, x = build("cifar_cnn", shape, norm=norm).train(), samples("cifar_cnn", 4, shape)
        weights = [parameter for parameter in network.parameters() if parameter.dim() == 4]
        assert [(len(weight), *weight.shape[2:]) for weight in weights] == [
            (channels, 3, 3) for channels in (32, 32, 64, 64, 128, 128)
        ]
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


@pytest.mark.parametrize(("name", "least"), [("mnist_cnn", 6), ("lenet", 14), ("cifar_cnn", 8), ("reuters_cnn", 12)])
def test_samples_below_the_minimum_size_are_refused(name: str, least: int) -> None:
    images = name in IMAGES
    shape = (3, least, least) if images else (least,)
    assert build(name, shape)(samples(name, 2, shape)).shape == (2, 10)
    for smaller in ((3, least - 1, 40), (3, 40, least - 1)) if images else ((least - 1,),):
        with pytest.raises(ValueError, match=f"network {name} needs (images|texts) of at least {least} .*not "):
            build(name, smaller)


def test_unknown_and_unsupported_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown norm ghost\(0\); known: none"):
        build("cifar_cnn", norm="ghost(0)")
    for name in CLASSIFIERS:
        if name != "cifar_cnn":
            with pytest.raises(ValueError, match=f"network {name} has no option norm; (use cifar_cnn|remove it)$"):
                build(name, norm="group")


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({"crop": 8}, "unet, smooth_unet"),
        ({"shape": (1, 28, 28), "classes": 10}, "mnist_cnn, lenet, reuters_cnn, cifar_cnn"),
        ({"shape": (300,), "classes": 46, "vocabulary": 50}, "reuters_cnn"),
    ],
)
def test_an_unknown_network_is_answered_with_those_that_suit_the_samples(options: dict[str, Any], known: str) -> None:
    with pytest.raises(ValueError, match=f"^network.name: unknown network vgg; known: {known}$"):
        build_network("vgg", **options)


TEXTS = {"shape": (300,), "vocabulary": 50}
LABELED = {"shape": (1, 28, 28)}
VOLUMES = {"crop": 8, "in_channels": 4, "out_channels": 5, "width": 4, "scales": 2, "space_to_depth": ()}
VOLUMES |= {"fused": False, "norm": "none"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, TEXTS, f"network {name} cannot be used with texts; use reuters_cnn") for name in IMAGES),
        ("lenet", {"shape": (5, 28)}, "network lenet takes images, .*not samples of shape 5 x 28$"),
        ("reuters_cnn", {**TEXTS, "shape": (1, 28, 28)}, "reuters_cnn takes texts, not samples of shape 1 x 28 x 28"),
        ("reuters_cnn", {"shape": (300,)}, r"reuters_cnn takes texts, .*without a vocabulary"),
        ("lenet", {**LABELED, "depth": 3}, "network lenet has no option depth; remove it"),
        ("unet", LABELED, "^network unet cannot be used with labeled samples; use one of mnist_cnn, lenet, "),
    ],
)
def test_a_network_refuses_samples_of_another_kind(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(name, classes=10, **options)


def test_the_u_net_accepts_the_options_for_volumes_and_classifiers_refuse_them() -> None:
    assert build_network("unet", **VOLUMES)(torch.zeros(1, 4, 8, 8, 8)).shape == (1, 5, 8, 8, 8)
    with pytest.raises(ValueError, match="network unet has no option depth; remove it"):
        build_network("unet", **VOLUMES, depth=3)
    for name in CLASSIFIERS:
        with pytest.raises(
            ValueError, match=f"^network {name} cannot be used with volumes; use one of unet, smooth_unet$"
        ):
            build_network(name, **VOLUMES)
