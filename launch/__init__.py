"""Command line, Hydra configuration and process groups: the only part that reads environment variables."""
