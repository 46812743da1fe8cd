"""What the offline API takes and gives."""
