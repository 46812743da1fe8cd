"""Parameters, settings and outputs of the offline API."""
