"""Networks of users: every fault ends in one line that names it, before anything is trained."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from small_steps import world_on
from torch import nn
from trainings import YAML, last, metrics

import networks
import train
from utils import config as configs
from utils import preflight
from utils.config.sections import NetworkConfig
from utils.errors import UserError
from utils.steps import build
from utils.steps.own_network import check_output

SOURCE = """import torch
from torch import nn

class Net(nn.Conv3d):
    def __init__(self, in_channels, out_channels, *, depth, width=3):
        if depth < 1:
            raise ValueError("too flat")
        super().__init__(in_channels, out_channels - width, 1)

class Scaled(nn.Conv3d):
    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels, 1)
        self.first = self.weight.abs().max().item()

    def forward(self, x):
        return super().forward(x) / self.first

class Free(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.scale = nn.Parameter(torch.ones(1))

class Conditioned(nn.Conv3d):
    def __init__(self, in_channels, out_channels, conditions):
        super().__init__(in_channels, out_channels, 1)
        self.linear = nn.Linear(len(conditions), out_channels)

    def forward(self, x, conditions):
        return super().forward(x) + self.linear(conditions)[..., None, None, None]

class Classifier(nn.Linear):
    def __init__(self, shape, classes, less):
        super().__init__(shape[-1], classes - less)

    def forward(self, x):
        return super().forward(x.mean((1, 2)))

class Layers(nn.Module):
    def __init__(self, in_channels, out_channels, kind=""):
        super().__init__()
        self.kind = kind
        self.a = nn.Conv3d(in_channels, 8, 1)
        self.b = nn.LazyConv3d(out_channels, 1) if kind == "lazy" else nn.Conv3d(8, out_channels, 1)
        for layer in {"frozen": [self.a, self.b], "frozen first": [self.a]}.get(kind, []):
            layer.requires_grad_(False)
        if kind == "unused":
            self.aux = nn.Conv3d(8, 2, 1)
        if kind == "complex":
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        result = self.b(torch.relu(self.a(x)))
        return result.detach() if self.kind == "detached" else result

class Loss(nn.Module):
    def __init__(self, lambda_rho=0.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0 + lambda_rho))

    def forward(self, outputs, targets):
        return self.factor * (outputs - targets).abs().mean()

class CellLoss(nn.Module):
    def forward(self, outputs, targets):
        return (outputs - targets).abs()

class TrainedLoss(Loss):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

class Descent(torch.optim.SGD):
    def __init__(self, params, lr, speed):
        super().__init__(params, speed * lr)

class Largest(nn.Module):
    def __init__(self, power=1):
        super().__init__()
        self.power = power

    def forward(self, outputs, targets):
        return (outputs - targets).abs().amax() ** self.power

def function(outputs, targets):
    return (targets - targets.flip(1)).square().mean()
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_net.py").write_text(SOURCE)
    (tmp_path / "broken_net.py").write_text("import torch\n\nclass Net(:\n")
    (tmp_path / "exits_net.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_net", None)


MASS: dict[str, Any] = {"channels": {"targets": [{"name": "mass"}]}, "N_out_channels": 1}


def network(name: str, keys: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    changes = {"network.name": name, "network.options": options, **(keys or {})}
    return build.network(configs.load(YAML, "test", changes))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"network.name": "own_net.Net", "network.options.dept": 2}, "no option dept; did you mean depth?; known: in"),
        ({"network.name": "own_net.Net"}, "own_net.Net needs its option depth; set network.options.depth; known: in"),
        ({"network.name": "own_net.Net", "network.options.depth": 0}, "ValueError: too flat (TMP/own_net.py, line 7)"),
        ({"network.name": "own_net.Nett"}, "Nett does not exist; did you mean Net?; own_net has Net, Scaled, Free, C"),
        ({"network.name": "own_net.function"}, "function is no class derived from Module; own_net has Net"),
        ({"network.name": "nowhere_net.Net"}, "no module nowhere_net in TMP; correct the name"),
        ({"network.name": "broken_net.Net"}, "cannot import broken_net: SyntaxError: "),
        ({"network.name": "exits_net.Net"}, "cannot import exits_net: SystemExit: 3 (TMP/exits_net.py, line 1)"),
        ({"network.name": "../own_net.Net"}, "'../own_net.Net' is not the name of a class; write it as my_module.name"),
        ({"network.name": "own_net.Layers", "network.options.kind": "frozen"}, "no parameter to train; make layers at"),
        ({"network.name": "own_net.Layers", "network.options.kind": "complex"}, "parameter phase is complex, which op"),
        ({"network.name": "unet", "network.options.dept": 2}, "network unet has no option dept; remove it"),
        ({"loss": "own_net.CellLoss"}, "loss own_net.CellLoss returns no scalar that depends on the network's outputs"),
        ({"loss": "own_net.TrainedLoss"}, "loss own_net.TrainedLoss has parameters, which no optimizer trains; move"),
        ({"loss": "own_net.Loss", "channel_weights": [1, 2, 2, 2, 1]}, "has no option weights; known: lambda_rho"),
        ({"loss": "huber", "loss_options": {"delta": 0.2}}, "loss huber has no delta; remove lambda_rho, channel_w"),
        ({"metrics": ["own_net.functio"]}, "metrics own_net.functio: functio does not exist; did you mean function?"),
        ({"metrics": ["own_net.Net"]}, "metrics own_net.Net: cannot be built: TypeError: "),
        ({"loss": "own_net.Conditioned"}, "needs its option in_channels; set loss_options.in_channels"),
        ({"optimizer.name": "own_net.Descent"}, "optimizer own_net.Descent needs its option speed; set optimizer.opt"),
        ({"optimizer.name": "adamm"}, "lamb, soap; did you mean adam?; a class of your own is named my_module.MyOpt"),
    ],
)
def test_faulty_names_options_losses_and_optimizers_are_one_line(keys: Any, line: str, tmp_path: Path) -> None:
    config = configs.load(YAML, "test", keys).for_world(1)
    with pytest.raises(UserError, match=re.escape(line.replace("TMP", str(tmp_path)))):
        build.step(config, world_on("cpu"), build.network_with_loss(config))


def test_a_constructor_gets_its_options_and_those_of_the_configs_keys_that_it_has() -> None:
    assert network("own_net.Free", any=1).options == {"any": 1}  # type: ignore[comparison-overlap]
    with pytest.raises(UserError, match=r"network own_net\.Net has no option norm"):
        network("own_net.Net", {"network.norm": "batch"})
    keys = {"network.conditions": ["redshift", "cell"], "network.condition_ranges": [[2.0, 3.0], [0.1, 0.2]]}
    build.check_output(configs.load(YAML, "test", {"network.name": "own_net.Conditioned", **keys}).for_world(1))
    with pytest.raises(UserError, match=r"network own_net\.Scaled has no option conditions; known: in_channels"):
        network("own_net.Scaled", keys)
    config = configs.load(str(Path(YAML).with_name("classification.yaml")), "digits_naive")
    config = config.model_copy(update={"network": NetworkConfig(name="own_net.Classifier", options={"less": 1})})
    with pytest.raises(UserError, match=re.escape("output [1, 9], target [1, 10]")):
        check_output(config, build.network(config), torch.device("cpu"))


def test_vectors_with_a_targets_quantity_and_transform_are_added() -> None:
    assert network("unet", {"network.adds_vectors": True}).added == [None, 1, 2, 3, None]
    for scale, added in ((900.0, [None, 3, 1, 2]), (1000.0, [])):
        names = [f"gas velocity {axis}" for axis in "zxy"]
        parts = [{"name": name, "unit": "km/s", "scale": scale, "component": name} for name in names]
        own = {"channels": {"targets": [{"name": "temperature"}, *parts]}, "N_out_channels": 4}
        assert network("unet", {"network.adds_vectors": True, **own}).added == added
    digits = str(Path(YAML).with_name("classification.yaml")), "digits_naive", {}
    for path, name, keys in ((YAML, "test", MASS), (YAML, "test", {"network.name": "own_net.Scaled"}), digits):
        config = configs.load(path, name, {"network.adds_vectors": True, **keys}).for_world(1)
        assert not getattr(build.network(config), "added", None)
        lines = [*build.options_without_effect(config, world_on("cpu"))]
        assert lines[0].startswith("network.adds_vectors has no effect: not unet, or no vector has the quantity")


@pytest.mark.parametrize("how", ["train", "preflight", "preflight without a step"])
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["own_net.Net", "network.options.depth=1"], "output [1, 1, 8, 8, 8], target [1, 5, 8, 8, 8]"),
        (["own_net.Free"], "fails on an input [1, 4, 8, 8, 8] (target [1, 5, 8, 8, 8]): NotImplementedError"),
        (["registered"], "network registered: output list, target [1, 5, 8, 8, 8]"),
        (["own_net.Layers", "network.options.kind=detached"], "the output has no gradient; compute it without det"),
        (["own_net.Scaled"], None),
    ],
)
def test_a_network_with_another_output_than_the_targets_is_refused(
    flags: list[str], line: str | None, how: str, data_flags: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    """Fixed: one output for five was broadcast; constructors that read values failed. Also if a step does not fit."""

    class Registered(nn.Identity):
        def __init__(self, crop: int, in_channels: int, out_channels: int, width: int, scales: int) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
            return [x]

    monkeypatch.setitem(networks.NETWORKS, "registered", Registered)
    flags = [f"--set=network.name={flags[0]}", *(f"--set={flag}" for flag in flags[1:]), f"--set=expdir={tmp_path}/r"]
    command = [f"--yaml_config={YAML}", "--config=test", "--num_epochs=1", *data_flags, *flags]
    if how != "train":
        command.append("--preflight")
        monkeypatch.setattr(preflight, "fits_one_step", lambda *_: how == "preflight")
    if line is None:
        train.main(command)
        assert ("DONE ---- rank 0" if how == "train" else "all checks passed") in "".join(capsys.readouterr())
        return
    with pytest.raises(SystemExit, match="2"):
        train.main(command)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: network ")
    assert line in error
    assert not (tmp_path / "r").exists()


def trained(*flags: str, name: str = "own_net.Layers", run: str = "00") -> None:
    settings = (f"--set={flag}" for flag in (f"network.name={name}", "expdir=runs", *flags))
    train.main([f"--yaml_config={YAML}", "--config=test", "--num_epochs=1", f"--run_num={run}", *settings])


@pytest.mark.parametrize("kind", ["lazy", "frozen first"])
def test_lazy_layers_and_a_frozen_first_layer_train(kind: str, data_flags: list[str], capsys) -> None:
    """Fixed: weights without a shape were drawn, and a hook was set on a tensor without a gradient."""
    trained(f"network.options.kind={kind}", *(flag.removeprefix("--set=") for flag in data_flags))
    assert "DONE ---- rank 0" in "".join(capsys.readouterr())


@pytest.mark.parametrize("ddp", ["torch", "manual"])
def test_parameters_that_the_loss_ignores_are_named_before_ranks_wait(ddp: str, data_flags: list[str], capsys) -> None:
    """Fixed: the second step failed, after the first one had left the gradients of each rank to itself."""
    command = [f"--yaml_config={YAML}", "--config=test", "--preflight=2", *data_flags, f"--set=ddp={ddp}"]
    command += ["--set=network.name=own_net.Layers", "--set=network.options.kind=unused", "--set=expdir=runs"]
    with pytest.raises(SystemExit, match="2") if ddp == "torch" else contextlib.nullcontext():
        train.main(command)
    error = "the loss does not depend on aux.weight, aux.bias, for whose gradients DistributedDataParallel would wait"
    assert (error in capsys.readouterr().err) == (ddp == "torch")


@pytest.mark.parametrize("stated", [None, "normal"])
def test_weights_of_a_users_constructor_are_redrawn_only_if_the_config_states_it(stated: str | None, caplog) -> None:
    """Fixed: `weight_init` replaced them, unasked."""
    caplog.set_level("INFO")
    changes = {"network.name": "own_net.Layers", **({"weight_init.conv_init": stated} if stated else {})}
    config = configs.load(YAML, "test", changes).for_world(1)
    model = build.network_with_loss(config)
    before = model.network.state_dict()["a.weight"].clone()
    build.step(config, world_on("cpu"), model)
    assert torch.equal(model.network.state_dict()["a.weight"], before) == (stated is None)
    source = "drawn in place of the constructor's" if stated else "the constructor's, not drawn"
    assert f"initial weights: {source} (weight_init.conv_init is {stated or 'auto'})" in caplog.text


def test_a_loss_and_an_optimizer_of_a_user(data_flags: list[str], capsys) -> None:
    flags = ["network.name=unet", "loss=own_net.Loss", "optimizer.name=own_net.Descent", "optimizer.options.speed=2.0"]
    trained(*flags, "lambda_rho=0.5", *(flag.removeprefix("--set=") for flag in data_flags))
    printed = "".join(capsys.readouterr())
    assert "Optimizer: Descent" in printed
    assert "DONE ---- rank 0" in printed
    config = configs.load(YAML, "test", {"loss": "own_net.Loss", "lambda_rho": 0.5})
    assert float(build.loss(config)(torch.ones(1, 5), torch.zeros(1, 5))) == 2.5


def test_functions_and_modules_of_a_user_are_metrics(data_flags: list[str], tmp_path: Path) -> None:
    """Their means over the validation samples are logged; the density is calibrated along with them."""
    flags = ["loss=own_net.Loss", "loss_options.lambda_rho=1.5", "metrics=[own_net.function, own_net.Largest]"]
    trained("network.name=unet", *flags, *(flag.removeprefix("--set=") for flag in data_flags))
    run = tmp_path / "runs" / "test" / "1ranks" / "00"
    found = [record for record in metrics(run) if "Loss/valid" in record][-1]
    (path,) = (flag.partition("=")[2].partition("=")[2] for flag in data_flags if "val_path" in flag)
    with h5py.File(path) as file:
        variance = np.square(file["Hydro"][:] - file["Hydro"][:][::-1]).mean()
    assert found["Own net.function/valid"] == pytest.approx(variance, rel=0.2), "of some crops, not of all cells"
    assert 0 < found["Loss/valid"] / 3.5 < found["Own net.largest/valid"]
    assert last(run).state.calibration["density_factor"] > 0
