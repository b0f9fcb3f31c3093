"""Batch rendering: a job file in, a folder of clips, a store and a report out."""
