"""What is kept or removed together."""
