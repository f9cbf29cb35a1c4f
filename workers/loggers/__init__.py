"""Where the numbers of a training are logged: TensorBoard, Weights & Biases, MLflow."""
