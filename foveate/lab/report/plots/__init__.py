"""Plots as PNG, one module for each kind of rows; `figure` has what they share."""
