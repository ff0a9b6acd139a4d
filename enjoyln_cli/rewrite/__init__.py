"""Carry out a plan on a checkpoint's files, or on a model in memory."""
