"""What suites share: ranks, shapes, routing, time, tables and pictures."""
