"""The measured tables of the pages, from their records."""
