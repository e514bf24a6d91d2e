"""The ways in which a model is cut over ranks: tensor, context, expert, pipeline and data parallelism."""
