"""Prediction of whole volumes."""
