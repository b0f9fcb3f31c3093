"""From a prompt to a clip: jobs, models, recipes, the encoded file."""
