"""One step: which requests join, what is computed, what is copied, evicted, read and written."""
