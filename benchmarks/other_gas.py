"""The simulator with another reconstruction of its gas, and with other heating.

python -m benchmarks.other_gas --output box.h5     and the other flags of python -m simulation

The slopes are minmod's instead of van Leer's, hydrogen is reionized at z = 9 instead of 7.5, and the reionization of
He II leaves half of the heat. It is the same code otherwise.
"""

import sys

import torch


def minmod(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Half of the smaller difference to both neighbors where their signs agree, else 0."""
    smaller = torch.minimum(before.abs(), after.abs())
    return (before.sign() + after.sign()).mul_(0.25).mul_(smaller)


def main() -> int | None:
    from simulation import cooling, evolution, hydro, simulate

    hydro.half_slope = minmod
    cooling.REIONIZATION, cooling.HELIUM_HEAT = 9.0, cooling.HELIUM_HEAT / 2
    evolution.ATTRIBUTES["hydrogen_reionization_redshift"] = cooling.REIONIZATION
    evolution.ATTRIBUTES["helium_reionization_heat_ev"] = cooling.HELIUM_HEAT
    return simulate.main()


if __name__ == "__main__":
    sys.exit(main())
