"""Teacher-student training as one objective."""
