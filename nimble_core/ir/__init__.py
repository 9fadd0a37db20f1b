"""Frozen values that every stage passes on: programs, graphs, costs, schedules, timelines, measurements."""
