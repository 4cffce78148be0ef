"""What is being learned."""
