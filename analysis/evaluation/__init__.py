"""Evaluation of predicted volumes against simulations.

`statistics`, `spectra` and `bispectrum` measure fields; analysis/lyman_alpha measures the Lyman-alpha flux.
`results` holds and saves the measurements, `volume` evaluates a network or a file, `callback` does so during training,
`figures`, `training_figures`, `tables` and `report` show the results.
"""
