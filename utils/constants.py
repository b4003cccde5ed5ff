"""Physical constants (CODATA 2022, IAU 2015) that the simulation and the analysis share; the names have the units."""

BOLTZMANN_J_PER_K = 1.380649e-23
HYDROGEN_ATOM_KG = 1.6735328e-27
MEGAPARSEC_M = 3.0856775815e22
HYDROGEN_FRACTION = 0.76  # by mass; the rest is helium
