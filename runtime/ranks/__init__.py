"""Tensor parallel ranks over MPI."""
