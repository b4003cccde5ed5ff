"""Evaluation of predicted volumes against simulations.

`statistics` and `spectra` measure fields, `forest` measures the Lyman-alpha flux, whose physics is in `flux`. `results`
holds and saves the measurements, `volume` evaluates a network or a file, `callback` does so during training, `figures`,
`training_figures` and `report` show the results.
"""
