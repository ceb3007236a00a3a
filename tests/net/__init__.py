"""What must not change when code moves."""
