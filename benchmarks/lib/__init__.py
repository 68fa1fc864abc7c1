"""Parts that suites share: the skeleton, ranks, shapes, routing, time, tables and pictures."""
