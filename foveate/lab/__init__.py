"""What measures: tasks and rows, reports, benches, calibration and tuning of a model."""
