"""TensorRT plugins."""
