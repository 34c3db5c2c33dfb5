"""The parts that we bring: a data set, a model, a metric, a callback."""
