"""The parts of `simulate`, `plan` and `paper`: shapes of models, loads, clusters."""
