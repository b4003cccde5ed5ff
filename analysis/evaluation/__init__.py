"""Evaluation of predicted volumes against simulations.

`statistics`, `fields` and `spectra` measure a prediction; analysis/lyman_alpha measures the Lyman-alpha flux.
`results` holds and saves the measurements, `volume` evaluates a network or a file, `callback` does so during training,
`figures`, `training_figures`, `tables` and `report` show the results.
"""
