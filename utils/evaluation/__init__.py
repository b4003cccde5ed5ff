"""Evaluation of predicted volumes against simulations.

`statistics` and `spectra` measure fields; the Lyman-alpha flux is measured by utils/lyman_alpha, which is handed in.
`results` holds and saves the measurements, `volume` evaluates a network or a file, `callback` does so during training,
`figures`, `training_figures` and `report` show the results.
"""
