"""Evaluation: tasks, metrics with intervals, models loaded and asked, and a resumable runner."""
