"""Loggers of a training's numbers: TensorBoard, Weights & Biases, MLflow."""
