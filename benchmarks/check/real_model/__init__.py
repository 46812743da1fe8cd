"""check.real_model: what is shown with random weights elsewhere, with a real chat model and real
conversations."""
