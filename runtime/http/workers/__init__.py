"""Several processes that serve clients for the HTTP process."""
