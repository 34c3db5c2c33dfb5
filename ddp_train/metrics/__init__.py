"""Writers of metrics: console, JSON lines, TensorBoard, CSV, and trackers (W&B, MLflow, trackio). On global rank 0 only."""
