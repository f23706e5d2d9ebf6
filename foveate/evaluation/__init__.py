"""Evaluation: tasks, metrics with intervals, a resumable runner, and the accounting of what a result cost."""
