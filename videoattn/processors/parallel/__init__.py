"""Context parallelism: one clip's tokens over several ranks."""
