"""Small classifiers: a batch -> logits [N, classes].

Options are the `shape` of one sample and the number of `classes`; for texts the size of the `vocabulary`; and `norm`,
see norms.py. ValueError for images that are too small.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from networks.norms import build_norm


class MnistCnn(nn.Module):
    """Two 3x3 convolutions and two linear layers with dropout, for images [N, channels, height, width]."""

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = _image("mnist_cnn", shape, 6)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dense1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.dropout2 = nn.Dropout(0.5)
        self.dense2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.dense1(x.flatten(1))))
        return self.dense2(x)


class LeNet(nn.Module):
    """Convolutions alternating with average pooling, for images [N, channels, height, width] (LeCun et al. 1998)."""

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, *sides = _image("lenet", shape, 14)
        height, width = (((side - 2) // 2 - 4) // 2 for side in sides)
        self.conv1 = nn.Conv2d(channels, 20, 3)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.dense1 = nn.Linear(50 * height * width, 128)
        self.dense2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(images)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        return self.dense2(F.relu(self.dense1(x.flatten(1))))


class ReutersCnn(nn.Module):
    """Convolutions over the words of a text, for word indices [N, length] below `vocabulary`."""

    def __init__(self, *, shape: tuple[int, ...], classes: int, vocabulary: int | None = None) -> None:
        super().__init__()
        if vocabulary is None:
            raise ValueError("network reuters_cnn takes texts, not images; use mnist_cnn, lenet or cifar_cnn")
        (length,) = shape
        self.embedding = nn.Embedding(vocabulary, 7)
        self.conv1 = nn.Conv1d(7, 64, 5)
        self.conv2 = nn.Conv1d(64, 32, 3)
        self.dense = nn.Linear(32 * (((length - 4) // 2 - 2) // 2), classes)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).transpose(1, 2)  # [N, 7, length]
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        return self.dense(x.flatten(1))


class CifarCnn(nn.Module):
    """Three blocks of two convolutions, norms and activations that halve the sides of images [N, channels, H, W]."""

    BLOCKS = (32, 64, 128)  # channels

    def __init__(self, *, shape: tuple[int, ...], classes: int, norm: str = "none") -> None:
        super().__init__()
        before, height, width = _image("cifar_cnn", shape, 8)
        self.blocks = nn.Sequential()
        for channels in self.BLOCKS:
            for inputs in (before, channels):
                self.blocks.extend((nn.Conv2d(inputs, channels, 3, padding=1), build_norm(norm, channels), nn.ReLU()))
            self.blocks.append(nn.MaxPool2d(2))
            before = channels
        self.dense1 = nn.Linear(before * (height // 8) * (width // 8), 128)
        self.dense2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.dense2(F.relu(self.dense1(self.blocks(images).flatten(1))))


def _image(name: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of the samples; ValueError if they are smaller than `least`."""
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(f"network {name} needs images of at least {least} x {least}, not {height} x {width}")
    return channels, height, width
