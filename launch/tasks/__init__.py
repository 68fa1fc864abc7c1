"""The tasks of the command line."""
