"""What ``--dry-run`` says of each task, before anything starts."""
