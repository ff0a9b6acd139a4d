"""A plan carried out: on a checkpoint's files, or on a model in memory."""
