"""Parts that suites share: the skeleton, ranks, shapes, routing, time and tables."""
